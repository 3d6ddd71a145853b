"""The comparison behind scripts/differential: do engines get from this gateway what they get from their own proxies?

requests     what clients ask, in all the spellings that proxies may stumble over
engines      write down every request, and answer by the protocol
protocols    who waits for whom in each protocol, what is against its rules, and what engines say
pairs        which program is compared with which connector, and how both are started
differences  where two records of the same requests differ
corrections  the differences that are meant, each with its reason
"""
