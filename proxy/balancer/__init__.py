"""Who serves a request: backends, their loads and their health. No IO and no await in here.

pools, pool   the backends of one model and role; lease: one request's claim on one of them
roster        who there is; members: who of them may get a request now; chooser: who gets it, by a policy
policies      the rules, and what they learn of prefills and decodes
health        who is up, ejected or on trial, and whose fault a failure was
fitness       whether engines fit each other
engines       what is known of them: software, version, sizes, keys
shared        what all workers know of each other
"""
