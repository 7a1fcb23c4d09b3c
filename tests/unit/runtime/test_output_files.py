import os
import threading
from pathlib import Path

import pytest

from draftgraph.runtime.errors import ConfigError
from draftgraph.runtime.output_files import check_output_file, write_output_file


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_a_file_is_replaced_whole(tmp_path):
    file = tmp_path / "out.json"
    file.write_text("old, and longer")
    check_output_file("the JSON file", file)
    assert file.read_text() == "old, and longer"
    write_output_file(file, "new")
    assert file.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_link_stays_one(tmp_path):
    link = tmp_path / "latest.json"
    link.symlink_to(tmp_path / "today.json")
    check_output_file("the JSON file", link)
    write_output_file(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "today.json").read_text() == "text"


def test_a_pipe_is_written_to_and_not_replaced(pipe):
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    check_output_file("the JSON file", pipe)
    write_output_file(pipe, "text")
    reader.join(10)
    assert read == ["text"]
    assert pipe.is_fifo()


def test_half_a_character_costs_nothing_else(tmp_path):
    write_output_file(tmp_path / "out.json", '"\udc80"')
    assert (tmp_path / "out.json").read_text() == '"\\udc80"'


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"the JSON file '.*' is a directory"):
        check_output_file("the JSON file", tmp_path)
    with pytest.raises(ConfigError, match=r"there is no directory '.*nowhere'"):
        check_output_file("the JSON file", tmp_path / "nowhere" / "out.json")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a file system that takes no files is wanted")
def test_a_file_system_that_takes_no_files_is_refused():
    with pytest.raises(ConfigError, match=r"'/proc/x.json' cannot be written: '/proc' takes no file"):
        check_output_file("the JSON file", Path("/proc/x.json"))
