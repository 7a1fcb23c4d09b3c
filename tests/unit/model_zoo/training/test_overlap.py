from draftgraph.model_zoo.training.overlap import Overlap, overlap

LONG = "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural experiences."
CODE = "def has_close_elements(numbers, threshold):\n    for index, value in enumerate(numbers):\n        if value: 0"
SHORT = "Who wrote this?"


def test_independent_texts():
    assert overlap(["Write a travel blog post about Hawaii.", "def add(a, b): return a + b"], [LONG, CODE]) == ()


def test_a_prompt_inside_a_text_in_other_letters():
    text = f"Question:\n{LONG.upper().replace(' ', '  ')}\nAnswer: no"
    found = overlap(["nothing", text], [CODE, LONG])
    assert found == (Overlap(1, 1, "compose an engaging travel blog post about a recent trip to hawaii"),)


def test_a_run_of_twelve_words_and_one_of_eleven():
    words = LONG.split()
    assert len(overlap([" ".join(words[2:14])], [LONG])) == 1
    assert overlap([" ".join(words[2:13])], [LONG]) == ()
    assert len(overlap([" ".join(words[2:13])], [LONG], run=11)) == 1
    assert overlap([" ".join([*words[2:9], "and", *words[9:14]])], [LONG]) == ()


def test_identifiers_are_words():
    (found,) = overlap(
        ["# has_close_elements(numbers; threshold) for index value in enumerate numbers if value 0"], [CODE]
    )
    assert found.words.startswith("has_close_elements numbers threshold for")
    assert overlap(["has close elements numbers threshold for index value in enumerate numbers if"], [CODE]) == ()


def test_short_prompts_are_found_whole():
    assert overlap(["Tell me: who wrote THIS"], [SHORT]) == (Overlap(0, 0, "who wrote this"),)
    assert overlap(["Who wrote that?"], [SHORT]) == ()


def test_prompts_without_a_word():
    assert overlap([" ?! ", "?"], ["?!"]) == (Overlap(0, 0, ""),)


def test_several_held_out_prompts_share_a_run():
    assert [(o.text, o.held_out) for o in overlap([LONG, LONG], [LONG, LONG + " Now."])] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
