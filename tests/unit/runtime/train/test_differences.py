import pytest

from draftgraph.model_zoo.training.checkpoints import Difference
from draftgraph.runtime.train.differences import difference_text


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        (Difference("epochs", 1, 2), "--epochs was 1 and is 2"),
        (Difference("bfloat16", False, True), "--dtype was float32 and is bfloat16"),
        (Difference("method", "eagle3", "mtp"), "the method was eagle3 and is mtp"),
        (Difference("learn_prompts", True, False), "--learn-prompts was given and is not given"),
        (Difference("intermediate_size", None, 32), "--intermediate-size was none and is 32"),
        (Difference("option num_drafts", 3, 4), "--num-drafts was 3 and is 4"),
        (Difference("option aux_layers", None, [1, 2]), "--option aux_layers was none and is 1,2"),
        (
            Difference("option step_decay", None, 0.8, "now"),
            "--option step_decay is 0.8, and the run had no such option",
        ),
        (
            Difference("option anchors", 32, None, "was"),
            "--option anchors was 32, and there is no such option now",
        ),
        (Difference("target", "ab", "cd"), "--target names other weights than the run's"),
        (Difference("target", "ab", "cd", None, (None, "a")), "--target names other weights than the run's: a"),
        (Difference("target", "ab", "cd", None, ("a", "a")), "--target names other weights than the run's: a"),
        (Difference("target", "ab", "cd", None, ("a", "b")), "--target was a and is b, which are other weights"),
        (Difference("init_from", None, "cd", None, (None, "b")), "--init-from was not given and is b"),
        (Difference("init_from", "cd", None, None, ("a", None)), "--init-from was a and is not given"),
        (Difference("examples", "ab", "cd"), "the examples that --data gives are others"),
        (Difference("vocabulary", "ab", "cd"), "the tokens that the head can draft are others"),
    ],
)
def test_differences_are_told_by_flags(difference, text):
    assert difference_text(difference) == text
