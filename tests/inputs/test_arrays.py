"""Arrays on disk: what is read is what was written, and damage never passes for data."""

import json

import numpy as np
import pytest

from neuroflux.errors import NeuroFluxError
from neuroflux.inputs.arrays import ArrayFile, ArrayWriter, DamagedArray, write_json


def write(path, rows, parts=1):
    with ArrayWriter(path, rows.shape[1:], rows.dtype) as writer:
        for part in np.array_split(rows, parts):
            writer.append(part)
    return path


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float16, np.float32])
@pytest.mark.parametrize("row", [(), (5,), (3, 4, 2)])
def test_rows_come_back_in_the_order_asked_for(tmp_path, dtype, row):
    rows = np.random.default_rng(0).integers(0, 200, (17, *row)).astype(dtype)
    array = ArrayFile(write(tmp_path / "a.npy", rows, parts=4))
    for indices in ([0], [16], [3, 4, 5], [5, 4, 3], [2, 2, 9], list(range(17)), []):
        got = array.read(np.array(indices, np.int64))
        assert got.dtype == rows.dtype
        np.testing.assert_array_equal(got, rows[np.array(indices, np.int64)])
    assert (len(array), array.shape, array.nbytes) == (17, (17, *row), rows.nbytes)
    assert array.intact()


def test_numpy_can_map_the_file(tmp_path):
    rows = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    np.testing.assert_array_equal(np.load(write(tmp_path / "a.npy", rows), mmap_mode="r"), rows)


def test_values_are_converted_and_transposed_rows_kept(tmp_path):
    rows = np.arange(24).reshape(2, 3, 4).transpose(0, 2, 1)
    with ArrayWriter(tmp_path / "a.npy", (4, 3), np.uint8) as writer:
        writer.append(rows)
    np.testing.assert_array_equal(ArrayFile(tmp_path / "a.npy").read(np.arange(2)), rows.astype(np.uint8))


def test_an_empty_array_can_be_opened(tmp_path):
    with ArrayWriter(tmp_path / "a.npy", (3, 2), np.uint8):
        pass
    array = ArrayFile(tmp_path / "a.npy")
    assert len(array) == 0
    assert array.intact()


def test_a_failure_leaves_nothing_behind(tmp_path):
    def fail():
        with ArrayWriter(tmp_path / "a.npy", (2,), np.uint8) as writer:
            writer.append(np.zeros((3, 2), np.uint8))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_failure_keeps_the_array_that_was_there(tmp_path):
    path = write(tmp_path / "a.npy", np.ones((2, 2), np.uint8))

    def fail():
        with ArrayWriter(path, (2,), np.uint8) as writer:
            writer.append(np.zeros((9, 2), np.uint8))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    np.testing.assert_array_equal(ArrayFile(path).read(np.arange(2)), np.ones((2, 2)))


def test_rows_of_another_shape_are_refused(tmp_path):
    with pytest.raises(ValueError, match="rows of shape"), ArrayWriter(tmp_path / "a.npy", (2,), np.uint8) as writer:
        writer.append(np.zeros((1, 3), np.uint8))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_the_wrong_length_is_refused(tmp_path, change):
    path = write(tmp_path / "a.npy", np.ones((4, 8), np.uint8))
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + b"x")
    with pytest.raises(NeuroFluxError, match=r"a\.npy has 30\d bytes instead of 304"):
        ArrayFile(path)


def test_a_file_cut_while_open_is_an_error_and_not_a_crash(tmp_path):
    path = write(tmp_path / "a.npy", np.ones((4, 8), np.uint8))
    array = ArrayFile(path)
    with open(path, "r+b") as file:
        file.truncate(ArrayWriter.HEADER + 9)
    with pytest.raises(DamagedArray, match="ended early"):
        array.read(np.array([1]))
    with pytest.raises(DamagedArray, match="damaged near row 0"):  # its checksum is gone
        array.read(np.array([0]))


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("place", [0, 13, 31, 32, 47])
def test_a_flipped_bit_is_detected_where_it_is_read(tmp_path, bit, place):
    path = write(tmp_path / "a.npy", np.zeros((4, 8), np.uint8), parts=3)
    data = bytearray(path.read_bytes())
    data[ArrayWriter.HEADER + place] ^= 1 << bit
    path.write_bytes(data)
    array = ArrayFile(path)
    assert not array.intact()
    row = place // 8 if place < 32 else (place - 32) // 4
    for index in range(4):
        if index == row:
            with pytest.raises(DamagedArray, match=f"damaged near row {row}"):
                array.read(np.array([index]))
        else:
            array.read(np.array([index]))


def test_what_made_an_array_is_kept_with_it(tmp_path):
    with ArrayWriter(tmp_path / "a.npy", (2,), np.uint8, origin="these weights") as writer:
        writer.append(np.zeros((3, 2), np.uint8))
    assert ArrayFile(tmp_path / "a.npy").origin == "these weights"


@pytest.mark.parametrize(
    "manifest", [None, "", "{", "[]", "{}", '{"shape": [4, 8], "dtype": "nonsense", "origin": "", "crc32": 0}']
)
def test_a_missing_or_broken_manifest_is_refused(tmp_path, manifest):
    path = write(tmp_path / "a.npy", np.ones((4, 8), np.uint8))
    path.with_suffix(".json").unlink()
    if manifest is not None:
        path.with_suffix(".json").write_text(manifest)
    with pytest.raises(NeuroFluxError, match=r"cannot open the array .*a\.npy"):
        ArrayFile(path)


def test_write_json_replaces_the_whole_file(tmp_path):
    write_json(tmp_path / "x.json", {"long": list(range(100))})
    write_json(tmp_path / "x.json", {"short": 1})
    assert json.loads((tmp_path / "x.json").read_text()) == {"short": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
