import os
import signal

import pytest

from draftgraph.runtime.train.run import _interruptible


def test_ctrl_c_is_taken_after_an_update_and_a_second_one_at_once():
    said = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), _interruptible(said.append) as stop:  # noqa: PT012
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        assert "saving in this update" in said[0]
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second one ends it")
    assert signal.getsignal(signal.SIGINT) is before
