"""A file is written whole or not at all."""

import pytest

from gradinv.files import write_atomically


def test_the_folder_is_made_and_nothing_is_left_over(tmp_path):
    path = tmp_path / "new/folder/file.txt"
    write_atomically(path, lambda temporary: temporary.write_text("whole"))
    assert path.read_text() == "whole"
    assert [item.name for item in path.parent.iterdir()] == ["file.txt"]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def write(temporary):
        temporary.write_text("half")
        raise error

    with pytest.raises(error):
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["file.txt"]
