"""The comparison behind scripts/differential: do engines get from this gateway what they get from their own proxies?

requests     what clients ask, in all the spellings that proxies may stumble over
engines      write down every request, and answer by the protocol; wire: how they read; answers: what they say
protocols    who waits for whom in each protocol, and what is against its rules
pairs        which program is compared with which connector, and how both are started
units        what a request for several answers stands for
differences  where two records of the same requests differ
corrections  the differences that are meant, each with its reason
report       the table, and what nobody has explained
"""
