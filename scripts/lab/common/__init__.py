"""What the commands share.

invocation   what each does first: signals, limits, where it was called from
processes    programs started, waited for and stopped; proc: what the kernel tells of them
programs     gateways and engines that are killed, stopped and started again
environment  .venv-bench, where other programs are installed; peers: those, and how each is started
toxics       a network that can be spoilt
store        where several gateways share what they know
scripted     engines that do as each request says, and clients that check what comes
table        rows of text
"""
