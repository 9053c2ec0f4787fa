"""Graphs from files: Planetoid's, whose pickles run nothing, and your own; and what is measured of their embeddings."""

import collections
import math
import os
import pickle
import re
import shutil

import numpy as np
import pytest
import torch

from tigon import graph

N, F, CLASSES, TRAIN = 600, 5, 3, 6  # 30 nodes for testing, one of whose numbers is missing, as in CiteSeer
TEST = [i for i in range(569, N) if i != 580]


def drawn():
    draw = np.random.default_rng(0)
    return draw.integers(0, 2, (N, F)), draw.integers(0, CLASSES, N), draw.integers(0, N, (900, 2))


def write(folder, name="cora", scipy="scipy.sparse.csr", numpy="numpy.core"):
    """The files as Python 2 wrote them, with the modules' names of then."""
    from scipy.sparse import csr_matrix

    x, y, pairs = drawn()
    one_hot, order = np.eye(CLASSES, dtype=np.int32)[y], np.random.default_rng(1).permutation(TEST)
    links = collections.defaultdict(list, {i: [] for i in range(N)})
    for a, b in pairs.tolist():
        links[a] += [b, b]
    parts = {
        "x": csr_matrix(x[:TRAIN].astype(np.float32)), "y": one_hot[:TRAIN], "graph": links,
        "allx": csr_matrix(x[:569].astype(np.float32)), "ally": one_hot[:569],
        "tx": csr_matrix(x[order].astype(np.float32)), "ty": one_hot[order],
    }  # fmt: skip
    for part, value in parts.items():
        written = pickle.dumps(value, protocol=2)
        for now, then in ((b"scipy.sparse._csr", scipy), (b"numpy._core", numpy)):
            written = written.replace(now, then.encode())
        (folder / f"ind.{name}.{part}").write_bytes(written)
    (folder / f"ind.{name}.test.index").write_text("".join(f"{i}\n" for i in order))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    pytest.importorskip("scipy")
    folder = tmp_path_factory.mktemp("planetoid")
    write(folder)
    return folder


@pytest.fixture
def files(written, tmp_path):
    return shutil.copytree(written, tmp_path, dirs_exist_ok=True)


# (6, 1) bytes as Python 2 pickled them, with a string for what is bytes.
OLD = (
    b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I6\nI1\ntcnumpy\ndtype\n(S'u1'\nI0\n"
    b"I1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntbI00\nS'\\x01\\xff\\x01\\x01\\x01\\x80'\ntb."
)


@pytest.mark.parametrize(("scipy", "numpy"), [("scipy.sparse.csr", "numpy.core"), ("scipy.sparse._csr", "numpy._core")])
def test_the_files_of_planetoid_are_read(scipy, numpy, tmp_path):
    pytest.importorskip("scipy")
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", "citeseer", scipy, numpy)
    if numpy == "numpy.core":
        (tmp_path / "data" / "ind.citeseer.y").write_bytes(OLD)
    found = graph.planetoid("citeseer", tmp_path)
    x, y, pairs = drawn()
    x[580], y[580] = 0, -1
    np.testing.assert_allclose(found.x, x / np.maximum(x.sum(1, keepdims=True), 1), rtol=1e-6)
    assert found.y.tolist() == y.tolist()
    edges = {(int(a), int(b)) for a, b in pairs if a != b}
    edges |= {(b, a) for a, b in edges}
    assert found.edge_index.shape == (2, len(edges))
    assert set(map(tuple, found.edge_index.T.tolist())) == edges
    parts = (found.train, found.val, found.test)
    assert [part.tolist() for part in parts] == [[*range(6)], [*range(6, 506)], TEST]


class Evil:
    def __reduce__(self):
        return os.mkdir, (self.place,)


@pytest.mark.parametrize("part", ["x", "graph", "ally"])
def test_a_pickle_that_wants_to_run_code_is_refused(part, files):
    evil = Evil()
    evil.place = str(files / "was-here")
    value = {0: [evil]} if part == "graph" else [evil]
    (files / f"ind.cora.{part}").write_bytes(pickle.dumps(value, protocol=2))
    words = (
        f"ind.cora.{part} is no pickle of arrays: it wants {os.mkdir.__module__}.mkdir, and arrays and lists are all"
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        graph.planetoid("cora", files)
    assert not (files / "was-here").exists()


@pytest.mark.parametrize(
    "name", ["builtins.eval", "builtins.getattr", "numpy.load", "numpy.core.multiarray.fromfile", "os.system"]
)
def test_no_other_name_is_admitted(name, files):
    module, _, function = name.rpartition(".")
    (files / "ind.cora.y").write_bytes(f"c{module}\n{function}\n(S'1'\ntR.".encode())
    with pytest.raises(ValueError, match=re.escape(f"it wants {name}, and")):
        graph.planetoid("cora", files)


DTYPE, ARRAY = b"cnumpy\ndtype\n", b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"


def dtype(spelled, state=b""):
    return DTYPE + b"(S'" + spelled + b"'\nI0\nI1\ntR" + state


U1 = dtype(b"u1")


def array(shape=b"(I1\nt", kind=U1, content=b"S'a'\n", version=b"I1\n", tail=b""):
    return ARRAY + b"(" + version + shape + kind + b"I00\n" + content + tail + b"tb"


def csr(**state):
    """A matrix, each part of whose state is text of a pickle."""
    parts = {
        "_shape": b"(I1\nI2\nt", "data": array(), "indices": array(kind=dtype(b"u1"), content=b"S'\\x00'\n"),
        "indptr": array(b"(I2\nt", content=b"S'\\x00\\x01'\n"), **state,
    }  # fmt: skip
    items = b"".join(b"S'" + name.encode() + b"'\n" + value for name, value in parts.items())
    return b"\x80\x02cscipy.sparse.csr\ncsr_matrix\n)\x81}(" + items + b"ub"


# Each of 40 lists holds the one before twice.
DOUBLED = b"(lp100\n" + b"".join(b"(lp%d\ng%d\nag%d\na" % (n + 1, n, n) for n in range(100, 140))
NESTED = b"(lp0\n" + b"".join(b"0(lp%d\n" % i + b"g%d\na" % (i - 1) * 50 for i in range(1, 9))
TUPLES = b"I1\n\x85q\x00" + b"".join(b"0" + (b"h" + bytes([i])) * 2 + b"\x86q" + bytes([i + 1]) for i in range(60))


@pytest.mark.parametrize(
    "content",
    [
        # An array over bytes of the file: of objects, each an address that the file chose; of records with objects.
        b"cnumpy\nndarray\n((I1\nt" + dtype(b"O8") + b"S'AAAAAAAA'\ntR.",
        b"cnumpy\nndarray\n((I1\nt" + dtype(b"u1") + b"S'AAAAAAAA'\ntR.",
        b"\x80\x02cnumpy\nndarray\n(I1\nt\x81.",
        array(kind=dtype(b"O"), content=b"S'AAAAAAAA'\n") + b".",
        array(kind=dtype(b"O8"), content=b"(lI1\na") + b".",
        array(kind=DTYPE + b"((lS'a'\nS'O8'\n\x86atR", content=b"S'AAAAAAAA'\n") + b".",
        array(kind=dtype(b"V8", b"(I3\nS'|'\nN(S'a'\nt}S'a'\n" + dtype(b"O8") + b"I0\n\x86sI8\nI1\nI0\ntb")) + b".",
        # A state that makes a harmless dtype one of objects, or of other sizes than its bytes.
        array(kind=dtype(b"u1", b"(I3\nS'|'\nN(S'a'\nt}S'a'\n" + dtype(b"O8") + b"I0\n\x86sI8\nI1\nI63\ntb")) + b".",
        array(kind=dtype(b"u1", b"(I3\nS'|'\n" + dtype(b"O8") + b"(I4\nt\x86NNI8\nI1\nI63\ntb")) + b".",
        array(kind=dtype(b"u1", b"(I4\nS'x'\nNNNI-1\nI-1\nI0\ntb")) + b".",
        array(kind=dtype(b"u1", b"tb")) + b".",
        array(kind=dtype(b"M8[us]"), content=b"S'AAAAAAAA'\n") + b".",
        array(kind=dtype(b"S8"), content=b"S'AAAAAAAA'\n") + b".",
        array(kind=dtype(b"c16"), content=b"S'AAAAAAAAAAAAAAAA'\n") + b".",
        array(kind=b"S'u1'\n") + b".",
        # Shapes that are not those of the bytes.
        array(b"(I1000000000\nI1000000000\nt") + b".",
        array(b"(I-1\nt") + b".",
        array(b"(L99999999999999999999L\nt") + b".",
        array(b"(I0\nI4611686018427387904\nt", content=b"S''\n") + b".",
        array(b"(F1.0\nt") + b".",
        array(b"(" + b"I1\n" * 40 + b"t") + b".",
        array(content=b"N") + b".",
        array(content=b"(lI1\na") + b".",
        array(tail=b"I1\n") + b".",
        # Matrices of which a part is missing, is no array, or points outside.
        csr(data=b"N") + b".",
        csr(indices=array(content=b"S'\\x02'\n")) + b".",
        csr(indices=array(kind=dtype(b"i1"), content=b"S'\\xff'\n")) + b".",
        csr(indptr=array(b"(I2\nt", content=b"S'\\x00\\x02'\n")) + b".",
        csr(indptr=array(b"(I3\nt", content=b"S'\\x00\\x05\\x01'\n"), _shape=b"(I2\nI2\nt") + b".",
        csr(_shape=b"(I1000000000\nI1000000000\nt") + b".",
        csr(_shape=b"N") + b".",
        csr(data=b"I1\n", maxprint=b"I9\n") + b".",
        b"cscipy.sparse.csr\ncsr_matrix\n}S'shape'\nI1\nsb.",
        # Objects that must not change, be called, or be made.
        b"c_codecs\nencode\n(N}S'__defaults__'\n(S'a'\ntstb.",
        b"c__builtin__\nlist\n(I1\ntR.",
        b"ccollections\ndefaultdict\n(c_codecs\nencode\ntRI1\nI2\nsN}b.",
        b"(I1\nI2\ni__builtin__\nlist\n.",
        b"(c__builtin__\nlist\no.",
        b"\x82\x01.", b"P1\n.", b"I1\nQ.", b"\x97.", b"\x96" + b"\xff" * 7 + b"\x7f.",
        # Small files that ask for much memory or time.
        b"I1\nr\xff\xff\xff\x7f.",
        b"\x80\x05\x8e\x00\x00\x00\x00\x00\x00\x00\x10.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x00.",
        NESTED + b".",
        TUPLES + b"p90\n0}g90\nI1\ns.",
        b"L" + b"9" * 50_000 + b"L\n.",
        b"(" * 200_000 + b"t" * 200_000 + b".",
        # A list of 2^40 elements, of which text is asked: as bytes, as a size, as a dtype.
        b"c_codecs\nencode\n(" + DOUBLED + b"S'latin1'\ntR.",
        array(b"(" + DOUBLED + b"t") + b".",
        b"cnumpy\ndtype\n(" + DOUBLED + b"tR.",
    ],
)  # fmt: skip
def test_a_crafted_pickle_makes_no_object_and_takes_no_memory(content, files):
    (files / "ind.cora.allx").write_bytes(content)
    with pytest.raises(ValueError, match=r"^planetoid: .*(is no pickle of arrays|do not fit together|GiB)"):
        graph.planetoid("cora", files)


def test_a_node_of_an_astronomical_number_gets_a_sentence(files):
    for number, words in ((10**12, "GiB"), (10**30, "must hold a number of a node a line"), (-1, "0 or more, got -1")):
        (files / "ind.cora.test.index").write_text(f"{number}\n")
        with pytest.raises(ValueError, match=words):
            graph.planetoid("cora", files)


def broken(part, content):
    def change(files):
        file = files / f"ind.cora.{part}"
        file.unlink() if content is None else file.write_bytes(content)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (broken("graph", None), "must hold the files of cora, got none of ind.cora.graph. They are in the folder data"),
        (broken("x", b"\x80\x02no"), "ind.cora.x is no pickle of arrays: "),
        (broken("tx", b""), "ind.cora.tx is no pickle of arrays: "),
        (broken("test.index", b"3\nfour\n"), "ind.cora.test.index must hold a number of a node a line"),
        (broken("test.index", b"570\n571\n"), "ind.cora.* of"),
        (broken("graph", pickle.dumps([1, 2], 2)), "do not fit together"),
        (broken("graph", pickle.dumps({0: [N + 5]}, 2)), "do not fit together"),
        (broken("ally", pickle.dumps([], 2)), "do not fit together"),
    ],
)
def test_files_that_are_damaged_get_a_sentence(change, words, files):
    change(files)
    with pytest.raises(ValueError, match=r"^planetoid: ") as error:
        graph.planetoid("cora", files)
    assert words in str(error.value)


# ------------------------------------------------------------------------------------------------------- your own graph

X, EDGES = np.ones((4, 3), np.float32), np.array([[0, 1], [1, 0]])


def test_a_graph_of_your_own(tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    mask = np.array([True, False, True, False])
    arrays = {"x": X.astype(np.float64), "edge_index": EDGES, "y": np.array([0, 1, 1, -1]), "train_mask": mask,
              "val": ~mask, "test": np.array([2])}  # fmt: skip
    np.savez(tmp_path / "g.npz", **arrays)
    save_file(arrays, tmp_path / "g.safetensors")
    for file in ("g.npz", "g.safetensors"):
        found = graph.read_graph(tmp_path / file)
        assert found.x.dtype == torch.float32
        assert found.edge_index.tolist() == EDGES.tolist()
        assert found.y.tolist() == [0, 1, 1, -1]
        assert [part.tolist() for part in (found.train, found.val, found.test)] == [[0, 2], [1, 3], [2]]
    small = {"edge_index": EDGES.astype(np.uint16), "y": EDGES[0].repeat(2).astype(np.uint8)}
    np.savez(tmp_path / "small.npz", x=X, train=np.array([3, 1], np.uint8), **small)
    found = graph.read_graph(tmp_path / "small.npz")
    assert found.edge_index.tolist() == EDGES.tolist()
    assert found.y[found.train].tolist() == [1, 0]
    np.savez(tmp_path / "bare.npz", x=X, edge_index=EDGES)
    assert graph.read_graph(tmp_path / "bare.npz").y is None


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": X}, "must hold x (n, F) and edge_index (2, e), got no edge_index; it has x."),
        ({"edges": EDGES}, "got no x and no edge_index; it has edges."),
        ({"x": X, "edge_index": EDGES.T[:1]}, "edge_index must be (2, e) integers, sources and targets, got (1, 2)"),
        ({"x": X, "edge_index": EDGES + 3}, "edge_index must lie in [0, 4), the nodes, got 4."),
        ({"x": X, "edge_index": EDGES / 2}, "edge_index must be (2, e) integers"),
        ({"x": X[0], "edge_index": EDGES}, "x must be (n, F) floats, got (3,)"),
        ({"x": X * np.nan, "edge_index": EDGES}, "x must be finite, got nan, one of 12 such numbers."),
        ({"x": X, "edge_index": EDGES, "y": EDGES}, "y must be (4,) integers, got (2, 2)"),
        ({"x": X, "edge_index": EDGES, "train": np.array([9])}, "train must lie in [0, 4), the nodes, got 9."),
        ({"x": X, "edge_index": EDGES, "test": X}, "test must be a line of integers, got (4, 3)"),
        ({"x": X, "edge_index": EDGES, "train_mask": np.ones((4, 2), bool)}, "train_mask must be (4,) bools, the mask"),
        ({"x": X, "edge_index": EDGES, "val": np.ones(3, bool)}, "val must be (4,) bools, the mask of one split, got"),
        ({"x": X, "edge_index": EDGES, "test_mask": np.ones(4, int)}, "the mask of one split, got (4,) torch.int64."),
        ({"x": np.array([{}]), "edge_index": EDGES}, "must hold numbers, bools or texts, got Python objects."),
    ],
)
def test_arrays_that_do_not_fit_get_a_sentence(arrays, words, tmp_path):
    np.savez(tmp_path / "g.npz", **arrays)
    with pytest.raises(ValueError, match=re.escape(words)):
        graph.read_graph(tmp_path / "g.npz")


def test_files_that_are_no_graph_get_a_sentence(tmp_path):
    for name, words in (("g.pt", "must be .npz or .safetensors, got g.pt"), ("g.npz", "is not a complete .npz file")):
        (tmp_path / name).write_bytes(b"PK no")
        with pytest.raises(ValueError, match=re.escape(words)):
            graph.read_graph(tmp_path / name)
    (tmp_path / "g.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is not a complete \.npz file"):
        graph.read_graph(tmp_path / "g.npz")
    with pytest.raises(ValueError, match="file must be a file, which"):
        graph.read_graph(tmp_path / "none.npz")
    pytest.importorskip("safetensors")
    (tmp_path / "g.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        graph.read_graph(tmp_path / "g.safetensors")


# ------------------------------------------------------------------------------------------------------------ measures


def test_principal_angles_of_known_subspaces():
    draw = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(9, 9, generator=draw, dtype=torch.float64)).Q
    parts = [torch.randn(30, 2, generator=draw, dtype=torch.float64) @ turn[at : at + 2] for at in (0, 2)]
    # The third shares a direction with the first, and stands at 30° to another of it.
    tilted = torch.stack([turn[0], math.cos(math.pi / 6) * turn[1] + math.sin(math.pi / 6) * turn[5]])
    parts.append(torch.randn(30, 2, generator=draw, dtype=torch.float64) @ tilted)
    z, labels = torch.cat([*parts, torch.ones(1, 9)]), torch.tensor([7] * 30 + [2] * 30 + [9] * 30 + [-1])
    found = graph.principal_angles(z, labels, dims=2)
    assert found.shape == (3, 3, 2)
    right = torch.pi / 2 * torch.ones(2, dtype=torch.float64)  # in the order 2, 7, 9
    torch.testing.assert_close(found[0, 1], right)
    torch.testing.assert_close(found[0, 2], right)
    torch.testing.assert_close(found[1, 2], torch.tensor([0, torch.pi / 6], dtype=torch.float64), atol=1e-7, rtol=0)
    torch.testing.assert_close(found.diagonal().T, torch.zeros(3, 2, dtype=torch.float64), atol=1e-7, rtol=0)
    scipy = pytest.importorskip("scipy.linalg")
    bases = [torch.linalg.svd(z[labels == label]).Vh[:2].T.numpy() for label in (7, 9)]
    np.testing.assert_allclose(scipy.subspace_angles(*bases)[::-1], found[1, 2], atol=1e-7)


def test_the_picture_of_angles(tmp_path):
    pytest.importorskip("matplotlib")
    z, labels = torch.randn(40, 6), torch.arange(40) % 4
    angles = graph.principal_angles(z, labels, dims=2)
    graph.plot_angles(tmp_path / "a.png", {"before": angles, "after": angles})
    assert (tmp_path / "a.png").stat().st_size > 5000


def separable():
    """A graph whose nodes are told apart by the sign of a feature; of the test nodes, one in four is mislabelled."""
    y = torch.arange(40) % 2
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    x[:, 0] = 3.0 * (2 * y - 1)
    labels = y.clone()
    labels[30:40:4] = 1 - y[30:40:4]
    edges = torch.stack([torch.arange(39), torch.arange(1, 40)])
    return graph.Graph(x, edges, labels, torch.arange(20), torch.arange(20, 30), torch.arange(30, 40))


def test_a_probe_tells_classes():
    pytest.importorskip("sklearn")
    of = separable()
    assert graph.probe(of.x, of) == {"val": 1.0, "test": 0.7}
    assert graph.probe(1e3 * of.x, of) == {"val": 1.0, "test": 0.7}
    swapped = graph.Graph(of.x, of.edge_index, of.y, of.train, None, of.train)
    assert graph.probe(of.x, swapped, c=0.5) == {"test": 1.0}


Z, LABELS = torch.ones(4, 3), torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: graph.principal_angles(Z, LABELS, dims=0), "principal_angles: dims must be positive, got 0."),
        (lambda: graph.principal_angles(Z, LABELS, dims=3), "dims must be at most 2, for class 0 has 2 rows of 3"),
        (lambda: graph.principal_angles(Z[0], LABELS), "z must be (n, d) floats, got (3,) torch.float32."),
        (lambda: graph.principal_angles(Z, LABELS[:2]), "labels must be (4,), one a row of z, got (2,)."),
        (lambda: graph.principal_angles(Z, LABELS - 5, dims=1), "labels must name a class, got none."),
        (lambda: graph.planetoid("reddit", "."), "name must be one of 'cora', 'citeseer', 'pubmed', got 'reddit'."),
    ],
)
def test_measures_of_bad_input_get_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call()


@pytest.mark.parametrize(
    ("z", "change", "sentence"),
    [
        (torch.ones(39, 2), {}, "probe: z must be (40, d), a row for each node, got (39, 2)."),
        (torch.full((40, 2), torch.nan), {}, "probe: z must be finite, got NaN or infinity: the fit has diverged."),
        (torch.ones(40, 2), {"y": None}, "probe: graph must have y, train and test, got no y."),
        (torch.ones(40, 2), {"train": None, "test": None}, "got no train and no test."),
        (torch.ones(40, 2), {"train": torch.tensor([1, 3])}, "train must have nodes of two classes, got one."),
        (torch.ones(40, 2), {"y": -torch.ones(40).long()}, "y must have the labels of train, got -1, which is none."),
    ],
)
def test_a_probe_of_bad_input_gets_a_sentence(z, change, sentence):
    pytest.importorskip("sklearn")
    import dataclasses

    with pytest.raises(ValueError, match=re.escape(sentence)):
        graph.probe(z, dataclasses.replace(separable(), **change))
