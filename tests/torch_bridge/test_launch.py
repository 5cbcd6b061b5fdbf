"""Launching kernels of a bundle: what is compiled and kept, what a launch passes, what is refused. No GPU is needed."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from jkv.errors import JkvError
from jkv.page import layout
from jkv.registry import parse
from pallas_kernels import build
from pallas_kernels.bundle.facts import Attention, layout_digest
from pallas_kernels.bundle.read import Bundle, load_bundle
from pallas_kernels.bundle.request import Request
from pallas_kernels.bundle.write import write_bundle
from tests.pallas_kernels.devices import needs_triton
from tests.torch_bridge.fake_driver import FakeDriver
from torch_bridge import binaries, driver
from torch_bridge.binaries import Binary, binary_of
from torch_bridge.launch import KernelSource, Library
from torch_bridge.launcher import Launcher
from torch_bridge.lowering import Lowering

SPEC = "rtn:bits=2"
FACTS = {"spec": SPEC, "head_dim": 64, "num_kv_heads": 2}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("bundles") / "some.jkv"
    request = Request(targets=("sm_90",), specs=(SPEC,), head_dims=(64,), gqas=(4,), num_kv_heads=(2,), steps=(1,))
    write_bundle(request, folder, processes=1)
    return load_bundle(folder)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was compiled, by a compiler that adds two hidden parameters."""
    names: list[str] = []

    def compile(lowered, target: str) -> build.Compiled:
        names.append(lowered.name)
        pointers = lowered.text.split("{\n")[1].count("!tt.ptr")
        image = f"{lowered.name} for {target}".encode()
        return build.Compiled(lowered.name, target, "", image, "", 1, 0, 4096, 4, 128, pointers + 2)

    monkeypatch.setattr(build, "compile", compile)
    monkeypatch.setattr(build, "available", lambda: True)
    monkeypatch.setattr(build, "version", lambda: (3, 6))
    return names


@pytest.fixture
def fake() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def library(bundle: Bundle, compiled: list[str], fake: FakeDriver, tmp_path: Path) -> Library:
    return Library(bundle, "cpu", cache=tmp_path, driver=fake, target="sm_90")


def _tensors(kernel: Launcher, sizes: dict[str, int], **others: torch.Tensor) -> list[torch.Tensor]:
    return [others.get(name, kernel.empty(name, sizes)) for name in kernel.names]


SIZES = {"batch": 3, "splits": 5, "width": 7, "blocks": 9}


def test_a_launch_passes_pointers_in_order(library: Library, fake: FakeDriver):
    split = library.kernel("split", gqa=4, **FACTS)
    tensors = _tensors(split, SIZES)
    split.launch(SIZES, *tensors)
    (launched,) = fake.launched
    where = dict(zip(split.names, tensors, strict=True))
    assert launched.addresses == (*(where[a.name].data_ptr() for a in split.kernel.arguments), 0, 0)
    assert launched.grid == (3, 2, 5) and launched.threads == 128 and launched.shared_bytes == 4096
    assert launched.entry == "jkv_decode_warp" and launched.stream == 77


def test_grids_follow_sizes_and_results_have_room(library: Library, fake: FakeDriver):
    split = library.kernel("split", gqa=4, **FACTS)
    for batch, splits in ((1, 1), (3, 5), (256, 128)):
        sizes = {"batch": batch, "splits": splits, "width": 3, "blocks": 9}
        split.launch(sizes, *_tensors(split, sizes))
        assert fake.launched[-1].grid == (batch, 2, splits)
        assert split.elements("o", sizes) == batch * 2 * splits * 4 * 64
    write = library.kernel("write", **FACTS)
    for tokens in (1, 16, 17, 1000):
        sizes = {"tokens": tokens, "blocks": 2}
        write.launch(sizes, *_tensors(write, sizes))
        assert fake.launched[-1].grid == (-(-tokens // 16), 2, 1)


def test_the_pool_is_one_tensor(library: Library, fake: FakeDriver):
    write = library.kernel("write", **FACTS)
    sizes = {"tokens": 40, "blocks": 2}
    pool = write.empty("pool", sizes)
    assert write.names.count("pool") == 1
    write.launch(sizes, *_tensors(write, sizes, pool=pool))
    assert fake.launched[-1].addresses.count(pool.data_ptr()) == 2


def test_variants_by_size(library: Library, fake: FakeDriver, compiled: list[str]):
    combine = library.kernel("combine", gqa=4, **FACTS)
    assert compiled == ["jkv_combine"] * 3
    images = set()
    for splits, function in ((1, 0), (4, 0), (5, 1), (16, 1), (17, 2), (1000, 2)):
        sizes = {"batch": 2, "splits": splits}
        plan = combine._plan((), sizes, _tensors(combine, sizes))
        assert plan[0] is combine._functions[function], splits
        images.add(plan[0])
    assert len(images) == 3


def test_bound_tensors_are_given_once(library: Library, fake: FakeDriver):
    split = library.kernel("split", gqa=4, **FACTS)
    sizes = library.sizes(SIZES)
    assert sizes.tolist() == [[7, 5, 0, 9, 0, 0, 0, 0]] and library.sizes(dict(SIZES)) is sizes
    pool = split.empty("pool", SIZES)
    bound = split.bind({"pool": pool, "sizes": sizes})
    assert set(split.names) - set(bound.names) == {"pool", "sizes"} and split.names != bound.names
    tensors = _tensors(bound, SIZES)
    bound.launch(SIZES, *tensors)
    where = dict(zip(bound.names, tensors, strict=True)) | {"pool": pool, "sizes": sizes}
    assert fake.launched[-1].addresses[:-2] == tuple(where[a.name].data_ptr() for a in split.kernel.arguments)
    with pytest.raises(JkvError, match="'split' takes no 'q'; it takes block_table, first"):
        split.bind({"q": pool})
    with pytest.raises(JkvError, match=r"pool of 'split' is torch.int32; it must be torch.uint8"):
        split.bind({"pool": sizes})
    with pytest.raises(JkvError, match="pool of 'split' starts at address 0x"):
        split.bind({"pool": torch.empty(pool.numel() + 1, dtype=torch.uint8)[1:]})


def test_tables_are_given_by_the_library(library: Library, fake: FakeDriver):
    prepare = library.kernel("prepare", gqa=4, **FACTS)
    assert prepare.names == ("q", "k/scale_mult", "k/zero_mult", "inverse", "fragments", "sums")
    assert any(argument.role == "table" for argument in prepare.kernel.arguments)
    prepare.launch({"batch": 2}, *_tensors(prepare, {"batch": 2}))
    assert all(fake.launched[-1].addresses[:-2]) and fake.launched[-1].addresses[-2:] == (0, 0)


def test_repeated_launches_take_new_addresses_streams_and_devices(library: Library, fake: FakeDriver):
    split = library.kernel("split", gqa=4, **FACTS)
    for queue in (1, 2):
        fake.queue = queue
        tensors = _tensors(split, SIZES)
        split.launch(SIZES, *tensors)
        assert fake.launched[-1].stream == queue
        assert fake.launched[-1].addresses[0] == tensors[0].data_ptr()
    fake.device = 3
    split.launch(SIZES, *tensors)
    assert fake.launched[-1].stream == 2 and fake.device == 3


def test_launches_from_several_threads_do_not_mix(library: Library, fake: FakeDriver):
    split = library.kernel("split", gqa=4, **FACTS)
    sets = [_tensors(split, SIZES) for _ in range(4)]

    def run(tensors: list[torch.Tensor]) -> None:
        for _ in range(50):
            split.launch(SIZES, *tensors)

    threads = [threading.Thread(target=run, args=(tensors,)) for tensors in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    order = [split.names.index(argument.name) for argument in split.kernel.arguments]
    expected = {(*(tensors[i].data_ptr() for i in order), 0, 0) for tensors in sets}
    assert len(fake.launched) == 200 and {launched.addresses for launched in fake.launched} == expected


def test_nothing_to_do_is_not_launched(library: Library, fake: FakeDriver):
    write = library.kernel("write", **FACTS)
    sizes = {"tokens": 0, "blocks": 2}
    write.launch(sizes, *_tensors(write, sizes))
    assert not fake.launched


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("stored", lambda x: x.long(), "stored of 'split' is torch.int64; it must be torch.int32"),
        ("stored", lambda x: x.to("meta"), "stored of 'split' is on meta; it must be on cpu"),
        ("o", lambda x: x[:-1], r"o of 'split' of shape \(7679,\) has 7679 elements; it must have 7680"),
        ("inverse", lambda x: x.view(4, 6).T, r"inverse of 'split' has strides \(1, 6\); it must be contiguous"),
        ("block_table", lambda x: x[:-1], "block_table of 'split' of shape .* has 20 elements; it must have 21"),
        ("stored", lambda x: torch.empty(4, dtype=torch.int32)[1:], "stored of 'split' starts at address .* of 32"),
    ],
)
@pytest.mark.parametrize("seen", [False, True], ids=["first", "later"])
def test_operands_that_do_not_fit_are_refused(
    library: Library, fake: FakeDriver, name: str, change, message: str, seen: bool
):
    split = library.kernel("split", gqa=4, **FACTS)
    tensors = _tensors(split, SIZES)
    if seen:
        split.launch(SIZES, *tensors)
    at = split.names.index(name)
    tensors[at] = change(tensors[at])
    before = len(fake.launched)
    with pytest.raises(JkvError, match=message):
        split.launch(SIZES, *tensors)
    assert len(fake.launched) == before


def test_other_misuse_is_refused(library: Library, fake: FakeDriver):
    split = library.kernel("split", gqa=4, **FACTS)
    tensors = _tensors(split, SIZES)
    with pytest.raises(JkvError, match=r"'split' takes \d+ tensors, not 1: block_table, first"):
        split.launch(SIZES, tensors[0])
    with pytest.raises(JkvError, match=r"lack 'splits', which the grid of 'split' depends on"):
        split.launch({"batch": 3}, *_tensors(split, SIZES))
    with pytest.raises(JkvError, match=r"lack 'blocks', which pool of 'split' depends on"):
        split.launch({"batch": 3, "splits": 5, "width": 7}, *tensors)
    many = {"batch": 1, "splits": 70000, "width": 1, "blocks": 1}
    with pytest.raises(JkvError, match=r"is a grid of \(1, 2, 70000\), more than a GPU has"):
        split.launch(many, *_tensors(split, many))
    write = library.kernel("write", **FACTS)
    wide = write.kernel.variants[-1].limits["tokens"] + 1
    with pytest.raises(JkvError, match=f"'write' does not take sizes .*; it takes tokens up to {wide - 1}"):
        write._chosen({"tokens": wide})
    with pytest.raises(JkvError, match="op='decode' is unknown; it must be one of prepare, split"):
        library.kernel("decode", **FACTS)
    with pytest.raises(JkvError, match=r"the facts of 'split' do not fit: .*'gqa'"):
        library.kernel("split", **FACTS)
    with pytest.raises(JkvError, match="no kernel 'split' for sm_90 with gqa=3; it has 4"):
        library.kernel("split", gqa=3, **FACTS)
    fake.fails = True
    with pytest.raises(JkvError, match="out of resources"):
        split.launch(SIZES, *tensors)


def test_pages_of_another_layout_are_refused(library: Library):
    own = layout_digest(layout(parse(SPEC), 64))
    assert library.kernel("split", gqa=4, layout=own, **FACTS) is library.kernel("split", gqa=4, **FACTS)
    with pytest.raises(JkvError, match=r"reads pages of layout \w+, not 0+; build the bundle anew"):
        library.kernel("split", gqa=4, layout="0" * 16, **FACTS)


def test_architectures_without_kernels_are_refused(bundle: Bundle, fake: FakeDriver):
    with pytest.raises(JkvError, match="architecture sm_80, which has no kernels; there are some for sm_90, gfx942"):
        Library(bundle, "cpu", driver=fake, target="sm_80")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_driver(bundle: Bundle):
    driver.driver.cache_clear()
    with pytest.raises(JkvError, match="torch sees none here"):
        Library(bundle, "cuda:0")


def test_binaries_are_kept_and_damaged_ones_made_anew(
    library: Library, bundle: Bundle, fake: FakeDriver, compiled: list[str], tmp_path: Path
):
    library.kernel("split", gqa=4, **FACTS)
    (kept,) = tmp_path.glob("*.bin")
    Library(bundle, "cpu", cache=tmp_path, driver=fake, target="sm_90").kernel("split", gqa=4, **FACTS)
    assert compiled == ["jkv_decode_warp"] and fake.images == [b"jkv_decode_warp for sm_90"] * 2
    for damage in (kept.read_bytes()[:-1], b"", b"{}\n", kept.read_bytes().replace(b"for", b"FOR")):
        kept.write_bytes(damage)
        Library(bundle, "cpu", cache=tmp_path, driver=fake, target="sm_90").kernel("split", gqa=4, **FACTS)
        assert fake.images[-1] == b"jkv_decode_warp for sm_90"
    assert compiled == ["jkv_decode_warp"] * 5
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]


def test_a_cache_that_cannot_be_written_is_no_error(
    bundle: Bundle, fake: FakeDriver, compiled: list[str], tmp_path: Path
):
    (tmp_path / "file").write_text("")
    Library(bundle, "cpu", cache=tmp_path / "file", driver=fake, target="sm_90").kernel("split", gqa=4, **FACTS)
    assert compiled == ["jkv_decode_warp"]


def test_keys_of_binaries(bundle: Bundle, compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    kernel = bundle.manifest.kernels[0]
    lowered = bundle.text(kernel, kernel.variants[0])
    binary_of(lowered, "sm_90", tmp_path)
    binary_of(lowered, "gfx950", tmp_path)
    monkeypatch.setattr(build, "version", lambda: (3, 9))
    binary_of(lowered, "sm_90", tmp_path)
    assert len(list(tmp_path.glob("*.bin"))) == 3


def test_without_triton_a_binary_of_the_bundle_serves(
    bundle: Bundle, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(build, "available", lambda: False)
    with pytest.raises(JkvError, match="must be compiled for sm_90, and triton is not installed"):
        Library(bundle, "cpu", cache=tmp_path, driver=fake, target="sm_90").kernel("split", gqa=4, **FACTS)


def test_the_cache_is_where_the_system_keeps_caches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    if sys.platform == "linux":
        assert binaries.cache_folder() == Path("/somewhere/jkv/kernels")


@needs_triton
def test_real_kernels_compile_and_shipped_binaries_are_used(fake: FakeDriver, tmp_path: Path):
    request = Request(
        targets=("sm_90", "gfx950"), specs=("bf16",), head_dims=(64,), gqas=(4,), num_kv_heads=(2,), steps=(1,)
    )
    write_bundle(request, tmp_path / "binary.jkv", processes=1, binary=True)
    shipped = load_bundle(tmp_path / "binary.jkv")
    facts: dict = {"spec": "bf16", "head_dim": 64, "num_kv_heads": 2, "gqa": 4}
    for target, warp in (("sm_90", 32), ("gfx950", 64)):
        own = FakeDriver()
        Library(shipped, "cpu", cache=tmp_path / "unused", driver=own, target=target).kernel("split", **facts)
        kernel = shipped.kernel("split", Attention(**facts), target)
        made = binary_of(shipped.text(kernel, kernel.variants[0]), target, tmp_path)
        assert own.images[0][:4] == made.image[:4] == b"\x7fELF"
        assert made.parameters >= len(kernel.arguments) and made.threads == warp * kernel.variants[0].num_warps
        assert isinstance(made, Binary) and made.entry == "jkv_decode"
    assert not (tmp_path / "unused").exists()


def test_lowering_on_demand(fake: FakeDriver, compiled: list[str], tmp_path: Path):
    source: KernelSource = Lowering(tmp_path / "lowered")
    library = Library(source, "cpu", cache=tmp_path, driver=fake, target="sm_90")
    facts = {"spec": "bf16", "head_dim": 64, "num_kv_heads": 2, "gqa": 4}
    assert library.kernel("split", **facts).kernel.name == "jkv_decode"
    assert library.kernel("combine", **facts).kernel.name == "jkv_combine"
    (kept,) = (tmp_path / "lowered").iterdir()  # one process made all three operations
    before = kept.stat().st_mtime_ns
    again = Library(Lowering(tmp_path / "lowered"), "cpu", cache=tmp_path, driver=fake, target="sm_90")
    assert again.kernel("prepare", **facts).kernel.name == "jkv_prepare_copies"
    assert kept.stat().st_mtime_ns == before
    with pytest.raises(JkvError, match="'split' could not be lowered for sm_90: scheme 'bg16' is unknown"):
        library.kernel("split", **facts | {"spec": "bg16"})


_SERVE = """
import sys, torch
from pathlib import Path
from pallas_kernels.bundle.read import load_bundle
from torch_bridge.launch import Library
from tests.torch_bridge.fake_driver import FakeDriver
from pallas_kernels import build

fake = FakeDriver()
build.available = lambda: True
build.version = lambda: (3, 6)
build.compile = lambda lowered, target: build.Compiled(lowered.name, target, "", b"", "", 1, 0, 0, 1, 32, 30)
library = Library(load_bundle(sys.argv[1]), "cpu", cache=Path(sys.argv[2]), driver=fake, target="sm_90")
for op in ("prepare", "split", "combine"):
    kernel = library.kernel(op, spec="rtn:bits=2", head_dim=64, num_kv_heads=2, gqa=4)
    sizes = {"batch": 2, "splits": 3, "width": 4, "blocks": 5}
    kernel.launch(sizes, *(kernel.empty(name, sizes) for name in kernel.names))
assert len(fake.launched) == 3
print(sorted(name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib", "flax", "ml_dtypes")))
"""


def test_serving_imports_no_jax(bundle: Bundle, tmp_path: Path):
    command = [sys.executable, "-c", _SERVE, str(bundle.folder), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[]"


def test_places_of_sizes_are_those_of_the_kernels():
    from pallas_kernels import sizes

    assert (sizes.BLOCKS, sizes.SPLITS, sizes.COUNT, sizes.POOL, sizes.LENGTH) == (0, 1, 2, 3, 8)


def test_a_bound_launch_moves_an_operand_wherever_the_kernel_takes_it(library: Library, fake: FakeDriver):
    """A pool is read and written, so the kernel has it twice: both places follow the address of a call."""
    kernel, sizes = library.kernel("flush", tail=32, **FACTS), {"pages": 3, "blocks": 5}
    operands = dict(zip(kernel.names, _tensors(kernel, sizes), strict=True))
    bound = kernel.bind({name: x for name, x in operands.items() if name not in ("pool", "page")})
    ready = bound.ready(sizes, *(operands[name] for name in bound.names))
    assert ready is not None and sorted(ready.names) == ["page", "pool", "pool"]
    moved = {name: operands[name].clone() for name in ("pool", "page")}
    ready(0, *(moved[name].data_ptr() for name in ready.names))
    (first,) = fake.launched
    want = {**operands, **moved}
    assert list(first.addresses) == [want[a.name].data_ptr() for a in kernel.kernel.arguments] + [0, 0]
