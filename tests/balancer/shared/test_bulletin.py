"""What one worker has told, the others need not."""

from __future__ import annotations

import os

from proxy.balancer.shared.memory import LogOnce
from tests.forking import in_child


def test_same_state_of_a_subject_is_news_once() -> None:
    bulletin = LogOnce()
    told = [("a", "up"), ("b", "up"), ("a", "up"), ("a", "down"), ("b", "up"), ("a", "up")]
    assert [bulletin.is_news(subject, word) for subject, word in told] == [True, True, False, True, False, True]


def test_state_of_a_forgotten_subject_is_news_again() -> None:
    bulletin = LogOnce()
    bulletin.is_news("a", "up")
    bulletin.is_news("b", "up")
    bulletin.forget("a")
    bulletin.forget("never told")
    assert (bulletin.is_news("a", "up"), bulletin.is_news("b", "up")) == (True, False)


def test_state_logged_by_another_process_is_no_news() -> None:
    bulletin = LogOnce()
    in_child(lambda: bulletin.is_news("a", "up"))
    assert not bulletin.is_news("a", "up")


def test_one_of_many_simultaneous_processes_logs_a_change() -> None:
    bulletin = LogOnce()
    begin, go = os.pipe()
    pids = []
    for _ in range(8):
        pid = os.fork()
        if not pid:
            os.close(go)
            os.read(begin, 1)  # ends when the last one is there
            os._exit(sum(bulletin.is_news(str(subject), "up") for subject in range(20)))
        pids.append(pid)
    os.close(go)
    assert sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids) == 20
    os.close(begin)


def test_full_record_logs_a_change_again() -> None:
    bulletin = LogOnce(100)
    assert all(bulletin.is_news(f"decode 10.0.0.1:{port}", "up") for port in range(7100, 7110))
    assert not bulletin.is_news("decode 10.0.0.1:7109", "up")
    assert bulletin.is_news("decode 10.0.0.1:7100", "up")
