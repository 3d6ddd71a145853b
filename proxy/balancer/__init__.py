"""Selection of backends for requests: their loads, their health and the policies. No IO and no await in this package.

pool             the backends of one model and role
lease            the claim of one request on one backend
roster           the backends that exist, for all workers
chooser, pick    the choice of a backend by a policy
policies         the policies, and what they learn of prefills and decodes
health           which backends are up, ejected or on probation; backend_health has the state of one backend
stalls           detection of backends that have stopped sending
blame            attribution of failures to an engine, a pair of engines or a request
incompatibilities, handoff_verdicts, recognition
                 engines that cannot work together or with this gateway
engines          facts about an engine: software, version, sizes, keys
shared           memory that all workers of a gateway read and write
"""
