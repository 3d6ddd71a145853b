"""The soak behind scripts/soak: mixed traffic, one fault after the other, and a judge of what became of it.

workload    what clients ask for, from a seed
answers     what an answer says, whole or streamed, in one form
traffic     the clients, a process of their own
cluster     engines, the network before each of them, and the gateways: all real processes, which are programs
gateways    how they are set up, what one asks of each, and the store by which several share what they know
listed      the engines in a file, where the gateways find them
recorder    what passes between the gateway and an engine, noted as legs
faults      what goes wrong, one backend at a time
changes     what is planned: engines are drained, evacuated and rolled
evidence    everything that was noted, read from the files it was noted in
invariants  what must hold: pure functions of the evidence, which are in checks_answers, checks_order and checks_load
report      the table at the end
"""
