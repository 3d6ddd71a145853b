"""What scripts/pick-error and scripts/memory measure: the picks of several workers, and the memory of a stream.

engines     prefillers and decoders that do as each request says, in one process, and note what reaches them
clients     streams whose every answer is checked
programs    the engines and the gateway, started and stopped, and the memory they use
picks       bursts in front of one worker and of several
memory      thousands of slow streams, and clients that read nothing
"""
