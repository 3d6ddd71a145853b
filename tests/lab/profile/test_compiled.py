"""Parsing perf's stacks."""

from __future__ import annotations

from lab.profile.compiled import Sample, samples

STACKS = """\
    ffffffff81a2b3c4 tcp_sendmsg+0x12 ([kernel.kallsyms])
    7f0000001000 __libc_send+0x20 (/usr/lib/libc.so.6)
    7f0000001800 __pyx_f_6uvloop_4loop_8UVStream__try_write (/there/uvloop/loop.so)
    7f0000002000 CPyDef_upstream___connection___EngineConnection___begin+0x1f (/there/x__mypyc.so)
    7f0000003000 CPyDef_connectors___leg_driver___LegDriver____send (/there/x__mypyc.so)

    7f0000004000 _PyObject_Malloc (/usr/lib/libpython3.11.so.1.0)
    7f0000005000 _PyEval_EvalFrameDefault+0x99 (/usr/lib/libpython3.11.so.1.0)
    7f0000003000 CPyDef_connectors___leg_driver___LegDriver____send (/there/x__mypyc.so)

    7f0000006000 uv__io_poll+0x1 (/there/uvloop/loop.so)
    7f0000005000 _PyEval_EvalFrameDefault+0x99 (/usr/lib/libpython3.11.so.1.0)

"""


def test_sample_belongs_to_innermost_compiled_function_or_interpreter_or_loop() -> None:
    assert list(samples(STACKS)) == [
        Sample("upstream.connection.EngineConnection.begin", is_kernel=True),
        Sample("interpreted code", is_kernel=False),
        Sample("the event loop", is_kernel=False),
    ]


def test_text_without_a_stack_has_no_sample() -> None:
    assert list(samples("\n\n# nothing was recorded\n\n")) == []
