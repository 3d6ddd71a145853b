"""scripts/soak: mixed traffic during one fault after the other, and a judge of the results.

workload    what clients send, from a seed
  traffic     the clients, a separate process that compares answers with those of a single engine
  cluster     engines, a network in front of each, gateways and their store
  recorder    records the requests between the gateway and an engine as legs
  faults      faults of one backend at a time, and planned changes: drains, evacuations and rolls
  evidence    all records of a run, read from files
  invariants  rules, as pure functions of the evidence; report: the table at the end
"""
