"""The soak behind scripts/soak: mixed traffic, one fault after the other, and a judge of what became of it.

workload    what clients ask for, from a seed
traffic     the clients, a process of their own, which compare answers with what an engine alone says
cluster     engines, the network before each of them, gateways and their store, and what one asks of them
recorder    what passes between the gateway and an engine, noted as legs
faults      what goes wrong, one backend at a time, and what is planned: engines are drained, evacuated and rolled
evidence    everything that was noted, read from the files it was noted in
invariants  what must hold: pure functions of the evidence
report      the table at the end
"""
