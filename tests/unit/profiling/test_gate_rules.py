import json
import math

import pytest

from draftgraph.profiling.baseline import Baseline, BaselineError, Measure, baseline_path, find_baseline
from draftgraph.profiling.device_name import device_name
from draftgraph.profiling.gate import Limits, Verdict, compare_counts, compare_measure, differences

LIMITS = Limits(least=0.10, most=0.15)


def baseline(**changes):
    content = {
        "device": "A processor, 2 cores",
        "made_with": {"torch": "2.13.0"},
        "counts": {"kernels": 3},
        "ratios": {"a / b": Measure(value=0.5, spread=0.02)},
        "seconds": {"a": Measure(value=1e-3, spread=0.1)},
    }
    return Baseline(**{**content, **changes})


def test_a_measure_is_the_median_and_its_spread():
    measure = Measure.of([1.0, 1.1, 0.9, 1.0, 1.2])
    assert measure.value == 1.0
    assert measure.spread == pytest.approx(0.3)
    for values in ([], [0.0], [-1.0], [math.nan], [math.inf]):
        with pytest.raises(ValueError, match="positive numbers"):
            Measure.of(values)


@pytest.mark.parametrize(("spread", "tolerance"), [(0.0, 0.10), (0.04, 0.12), (0.2, 0.15)])
def test_the_tolerance_follows_the_spread_within_limits(spread, tolerance):
    assert Measure(value=1.0, spread=spread).tolerance(0.10, 0.15) == pytest.approx(tolerance)


@pytest.mark.parametrize(
    ("now", "verdict"),
    [(0.5, Verdict.OK), (0.549, Verdict.OK), (0.551, Verdict.WORSE), (0.46, Verdict.OK), (0.45, Verdict.BETTER)],
)
def test_a_ratio_may_grow_as_far_as_the_tolerance(now, verdict):
    finding = compare_measure("ratio", "a / b", Measure(value=0.5, spread=0.0), now, LIMITS)
    assert finding.verdict is verdict
    assert finding.allowed == pytest.approx(0.55)


def test_what_cannot_be_compared_is_shown_and_what_is_unknown_fails():
    known = Measure(value=0.5, spread=0.0)
    finding = compare_measure("ratio", "a / b", known, 5.0, LIMITS, comparable=False)
    assert (finding.verdict, finding.before, finding.now) == (Verdict.SHOWN, 0.5, 5.0)
    assert compare_measure("ratio", "a / b", None, 5.0, LIMITS, comparable=False).verdict is Verdict.SHOWN
    assert compare_measure("ratio", "a / b", None, 5.0, LIMITS).verdict is Verdict.NEW


def test_counts_must_be_equal():
    before = {"same": 3, "more": 3, "fewer": 3, "gone": 1, "rare": 1}
    now = {"same": 3, "more": 4, "fewer": 2, "added": 1}
    found = {f.name: f.verdict for f in compare_counts(before, now, optional=frozenset({"rare"}))}
    assert found == {
        "same": Verdict.OK,
        "more": Verdict.CHANGED,
        "fewer": Verdict.CHANGED,
        "gone": Verdict.MISSING,
        "added": Verdict.NEW,
        "rare": Verdict.SHOWN,
    }
    assert [v for v in Verdict if v.fails] == [Verdict.WORSE, Verdict.CHANGED, Verdict.NEW, Verdict.MISSING]
    changed = compare_counts({"rare": 1}, {"rare": 2}, optional=frozenset({"rare"}))
    assert changed[0].verdict is Verdict.CHANGED


def test_limits_that_make_no_sense_are_refused():
    for least, most in ((0.0, 0.1), (0.2, 0.1), (-0.1, 0.1)):
        with pytest.raises(ValueError, match="least <= most"):
            Limits(least=least, most=most)


def test_a_baseline_survives_its_file(tmp_path):
    path = tmp_path / "new" / "baseline.json"
    baseline().save(path)
    assert Baseline.load(path) == baseline()
    assert path.read_text(encoding="utf-8").endswith("}\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format=7), "has format 7"),
        (lambda c: c.pop("counts"), "damaged: KeyError: 'counts'"),
        (lambda c: c["counts"].update(kernels=1.5), "a count is an integer, not 1.5"),
        (lambda c: c["counts"].update(kernels=True), "a count is an integer, not True"),
        (lambda c: c["ratios"].update(x=3), "damaged: TypeError"),
        (lambda c: c["ratios"].update(x={"value": 0, "spread": 0}), "positive value"),
        (lambda c: c["ratios"].update(x={"value": 1, "spread": -1}), "spread of at least 0"),
        (lambda c: c.update(device=""), "a non-empty string"),
        (lambda c: c.update(made_with=[]), "damaged: AttributeError"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, change, message):
    path = tmp_path / "baseline.json"
    baseline().save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(BaselineError, match=message) as caught:
        Baseline.load(path)
    assert str(path) in str(caught.value)


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(BaselineError, match="cannot be read: No such file"):
        Baseline.load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("{", encoding="utf-8")
    with pytest.raises(BaselineError, match="is not JSON"):
        Baseline.load(tmp_path / "text.json")
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    with pytest.raises(BaselineError, match="has format 'list'"):
        Baseline.load(tmp_path / "list.json")
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(BaselineError, match="cannot be written"):
        baseline().save(tmp_path / "file" / "baseline.json")


def test_the_devices_own_baseline_is_found_first(tmp_path):
    name = "Intel(R) Xeon(R) 8480+, 2 cores, AVX512"
    own = baseline_path(name, tmp_path)
    assert own.name == "intel-r-xeon-r-8480-2-cores-avx512.json"
    assert find_baseline(name, tmp_path) is None
    for other in ("b", "a"):
        baseline(device=other).save(baseline_path(other, tmp_path))
    assert find_baseline(name, tmp_path) == tmp_path / "a.json"
    baseline(device=name).save(own)
    assert find_baseline(name, tmp_path) == own


def test_the_device_is_named_with_its_cores():
    import os

    cores = os.cpu_count()
    name = device_name("cpu")
    assert f", {cores} core" in name
    assert not name.startswith(",")


def test_differences_show_both_sides_and_fail_nothing():
    new = baseline(counts={"kernels": 4, "nodes": 9}, ratios={})
    found = {(f.kind, f.name): (f.before, f.now) for f in differences(baseline(), new)}
    assert found == {
        ("count", "kernels"): (3, 4),
        ("count", "nodes"): (None, 9),
        ("ratio", "a / b"): (0.5, None),
        ("seconds", "a"): (1e-3, 1e-3),
    }
    assert not any(f.verdict.fails for f in differences(baseline(), new))
    assert all(f.before is None for f in differences(None, new))
