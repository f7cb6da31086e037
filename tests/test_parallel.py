"""Encoder calls over two ranks: vLLM's own sharding and gather with two gloo processes, and ranks that fail."""

import dataclasses
import gzip
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from typer.testing import CliRunner

from tests.processes import runs
from workbench.budgets import Configuration, Limits, resolve
from workbench.cli import app
from workbench.collectives import Ranks, join_ranks
from workbench.commands.parallel import parse_calls, size_here
from workbench.errors import WorkbenchError
from workbench.models import model_facts
from workbench.parallel import ARMS, ParallelRun, RankCall, agrees, balance, read_parallel, trace_ranks
from workbench.planner import plan
from workbench.trace import read_traces

pytestmark = pytest.mark.engine
pytest.importorskip("vllm", reason="the engine is not installed")

from workbench.encoder import parallel  # noqa: E402  needs torch
from workbench.encoder.parallel import Job, run_parallel  # noqa: E402
from workbench.encoder.session import SessionOptions  # noqa: E402

GLM = model_facts("glm4_1v")
OPTIONS = SessionOptions("glm4_1v", depth=1, width=128, device="cpu")
CONFIGURATION = Configuration((64, 128, 256), 4)
# One image, so that a rank has none; two equal ones; a skewed mix; more than the replays hold.
CALLS = [
    [(1, 16, 16)],
    [(1, 24, 24)] * 2,
    [(1, 32, 32), (1, 8, 8), (1, 4, 4), (1, 10, 12), (1, 6, 6)],
    [(1, 8, 8)] * 11 + [(1, 40, 40)],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks."""
    out = tmp_path_factory.mktemp("ranks") / "out"
    run_parallel(OPTIONS, CONFIGURATION, CALLS, 2, out, repeats=1, seconds=300)
    return out


def test_shared_calls_give_the_bits_of_one_rank(folder: Path) -> None:
    run = read_parallel(folder)
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert len({rank.model.weights_fingerprint for rank in run.ranks}) == 1
    assert agrees(run)
    for rank in run.ranks:
        assert all(share.equal and share.max_abs == 0 for share in rank.calls)
        assert all(len(samples) == 1 for share in rank.calls for samples in share.wall_us.values())


def test_shares_and_batches_are_the_planners(folder: Path) -> None:
    run = read_parallel(folder)
    for index, call in enumerate(CALLS):
        tokens = [GLM.tokens(grid) for grid in call]
        planned = plan(tokens, [0, len(tokens)], resolve(CONFIGURATION, Limits.of(GLM, video_limit=0)), dp=2).record()
        for rank in run.ranks:
            share = rank.calls[index]
            # The watch counts within the share.
            ours = [([share.items[i] for i in batch.items], batch.tokens, batch.budget) for batch in share.batches]
            theirs = [
                (batch["items"], batch["tokens"], batch["budget"])
                for batch in planned["calls"][0]["batches"]
                if batch["rank"] == rank.rank
            ]
            assert ours == theirs
            assert share.gathered_rows == max(other.calls[index].tokens for other in run.ranks)


def test_balance_counts_patches_and_padding(folder: Path) -> None:
    run = read_parallel(folder)
    rows = balance(run)
    assert [row.items for row in rows[:2]] == [[1, 0], [1, 1]]
    assert (rows[0].imbalance, rows[0].padded) == (2.0, 0.5)
    assert (rows[1].imbalance, rows[1].padded) == (1.0, 0.0)
    for row, call in zip(rows, CALLS, strict=True):
        assert sum(row.patches) == sum(t * h * w for t, h, w in call)
        assert min(row.waiting_us) == 0


def test_traces_carry_their_rank(folder: Path) -> None:
    for rank in range(2):
        trace = json.loads(gzip.decompress((folder / f"rank{rank}" / "trace.json.gz").read_bytes()))
        assert trace["distributedInfo"]["rank"] == rank
        assert trace["traceName"] == "trace.json.gz"  # no path of the machine that made it
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {f"call#{number} rank#{rank}" for number in range(len(CALLS))} <= names


@pytest.fixture(scope="module")
def weights_run(tmp_path_factory: pytest.TempPathFactory) -> ParallelRun:
    """ERNIE's layers shared by two ranks: one call that one replay holds, one of several, one above the budgets."""
    options = SessionOptions("ernie45_vl", depth=2, width=160, device="cpu")
    calls = [[(1, 16, 16)], [(1, 8, 8), (1, 32, 32), (1, 4, 10), (1, 16, 16), (1, 6, 6)]]
    out = tmp_path_factory.mktemp("weights") / "out"
    return run_parallel(options, CONFIGURATION, calls, 2, out, tp_mode="weights", repeats=1, seconds=300)


def test_shared_weights_give_the_values_of_one_rank(weights_run: ParallelRun) -> None:
    assert agrees(weights_run)
    assert balance(weights_run) == []
    for rank in weights_run.ranks:
        for call, share in zip(weights_run.calls, rank.calls, strict=True):
            assert share.items == list(range(len(call)))
            assert share.gathered_rows == 0
            assert share.gather_us == []
            assert set(share.wall_us) == set(ARMS)
            # Partial sums over two ranks round otherwise than one sum: equal bits would mean that nothing was shared.
            assert share.relative_rms is not None
            assert 0 < share.relative_rms < 0.03


def test_ranks_of_shared_weights_hold_the_same_answer(weights_run: ParallelRun) -> None:
    first, second = (
        [(share.relative_rms, share.eager_rms, share.max_abs, share.batches) for share in rank.calls]
        for rank in weights_run.ranks
    )
    assert first == second


@pytest.mark.parametrize("wrong", [0.5, None])
def test_values_beyond_rounding_do_not_agree(weights_run: ParallelRun, wrong: float | None) -> None:
    rank = weights_run.ranks[1]
    broken = msgspec.structs.replace(rank.calls[0], relative_rms=wrong, max_abs=wrong)
    assert msgspec.json.decode(msgspec.json.encode(broken), type=RankCall) == broken
    ranks = [weights_run.ranks[0], msgspec.structs.replace(rank, calls=[broken, *rank.calls[1:]])]
    assert not agrees(msgspec.structs.replace(weights_run, ranks=ranks))


def _joined(paths: list[Path]) -> Ranks:
    return join_ranks(read_traces(paths))


def _shifted(path: Path, shift_us: float, out: Path) -> Path:
    """Write a Kineto trace again with all its events later."""
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    for event in document["traceEvents"]:
        if "ts" in event:
            event["ts"] += shift_us
    out.write_bytes(gzip.compress(json.dumps(document).encode()))
    return out


@pytest.mark.parametrize("shift_us", [0.0, 123_456.0, -98_765.0])
def test_real_ranks_with_a_planted_offset(folder: Path, tmp_path: Path, shift_us: float) -> None:
    """Two gloo processes on one machine share its clock; one trace is then shifted."""
    first, second = (folder / f"rank{rank}" / "trace.json.gz" for rank in (0, 1))
    whole = _joined([first, second])
    moved = _joined([first, _shifted(second, shift_us, tmp_path / "moved.json.gz")])
    assert moved.clocks[1].ahead_us == pytest.approx(whole.clocks[1].ahead_us + shift_us, abs=0.002)
    # One clock, so no shift at all must be among what the collectives allow.
    assert whole.clocks[1].lowest_us <= 0 <= whole.clocks[1].highest_us
    before, after = ([row.waited_us for row in each.collectives] for each in (whole, moved))
    assert before == pytest.approx(after, abs=0.01)
    assert all(0 <= row.waited_us <= row.duration_us + 0.002 for row in moved.collectives)


def test_traced_calls_name_their_collectives_and_waits(folder: Path) -> None:
    run = read_parallel(folder)
    ranks, doubts = trace_ranks(folder, run)
    assert ranks is not None
    assert doubts == []
    assert {row.window for row in ranks.collectives} == {f"call#{number} rank#0" for number in range(len(CALLS))}
    for clock in ranks.clocks:
        own = [row for row in ranks.collectives if row.rank == clock.rank]
        assert len(own) == clock.collectives >= len(CALLS)
        assert clock.waited_us == pytest.approx(sum(row.waited_us for row in own))


def test_ranks_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    def change(rank: int, job: Job) -> Job:
        return msgspec.structs.replace(job, budgets=[64, 128]) if rank == 1 else job

    with pytest.raises(
        WorkbenchError, match=r"rank 1 has other budgets than rank 0 \(\[64, 128\], not \[64, 128, 256\]"
    ):
        run_parallel(OPTIONS, CONFIGURATION, CALLS[:1], 2, tmp_path / "out", seconds=300, change=change)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def kill(processes: "list[subprocess.Popen[bytes]]") -> None:
        started.extend(processes)
        processes[1].kill()

    began = time.monotonic()
    with pytest.raises(WorkbenchError, match="rank 1 was ended by SIGKILL; the other ranks were ended"):
        run_parallel(OPTIONS, CONFIGURATION, CALLS[:1], 2, tmp_path / "out", on_start=kill)
    assert time.monotonic() - began < 30  # the promise of the launcher
    assert all(process.poll() is not None for process in started)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_dies_in_the_middle_ends_the_others(tmp_path: Path) -> None:
    """The other rank waits in a collective that never ends."""
    started: list[subprocess.Popen[bytes]] = []
    died: list[float] = []

    def kill_when_it_measures() -> None:
        while not list(tmp_path.rglob("rank1")):  # the rank makes it after its graphs
            time.sleep(0.05)
        started[1].kill()
        died.append(time.monotonic())

    def watch(processes: "list[subprocess.Popen[bytes]]") -> None:
        started.extend(processes)
        threading.Thread(target=kill_when_it_measures, daemon=True).start()

    with pytest.raises(WorkbenchError, match="rank 1 was ended by SIGKILL; the other ranks were ended"):
        run_parallel(OPTIONS, CONFIGURATION, CALLS, 2, tmp_path / "out", repeats=10_000, on_start=watch)
    assert time.monotonic() - died[0] < 30  # the promise of the launcher
    assert all(process.poll() is not None for process in started)
    assert list(tmp_path.iterdir()) == []
    assert isinstance(started[0].args, list)
    ident = Path(started[0].args[3]).parent.name
    assert list(Path("/dev/shm").glob(f"{ident}*")) == []  # of vLLM's CPU groups


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom workbench.budgets import Configuration\n"
        "from workbench.encoder.parallel import run_parallel\nfrom workbench.encoder.session import SessionOptions\n"
        "run_parallel(SessionOptions('glm4_1v', depth=1, width=128, device='cpu'), Configuration((64,), 4), "
        "[[(1, 4, 4)]], 2, Path(sys.argv[1]), repeats=1_000_000, "
        "on_start=lambda ranks: print(*[rank.pid for rank in ranks], flush=True))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as launcher:
        assert launcher.stdout is not None
        ranks = launcher.stdout.readline().split()
        while not list(tmp_path.rglob("rank1")):  # both are measuring
            time.sleep(0.05)
        scratch = Path(Path(f"/proc/{ranks[0]}/cmdline").read_bytes().split(b"\0")[3].decode()).parent
        launcher.kill()
    assert len(ranks) == 2
    until = time.monotonic() + 30
    while any(map(runs, ranks)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(runs, ranks))
    parallel._clear_shared_memory(scratch.name)
    shutil.rmtree(scratch)


def test_ranks_that_take_too_long_are_ended(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="did not finish in 0 s"):
        run_parallel(OPTIONS, CONFIGURATION, CALLS[:1], 2, tmp_path / "out", seconds=0.2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "ranks", "calls", "message"),
    [
        (SessionOptions("glm4_1v", device="cuda"), 2, CALLS, "2 ranks need 2 GPUs and 1 is visible"),
        (SessionOptions("glm4_1v"), 4, CALLS, "4 ranks need 4 GPUs"),
        (OPTIONS, 1, CALLS, "ask for 2 or more"),
        (OPTIONS, 99_999, CALLS, "99999 ranks are more than one host takes"),
        (dataclasses.replace(OPTIONS, depth=0), 2, CALLS, "depth 0 is not between"),
        (dataclasses.replace(OPTIONS, width=7), 2, CALLS, "width 7 is not a multiple"),
        (OPTIONS, 2, [], "no call"),
        (OPTIONS, 2, [[]], "without items"),
        (SessionOptions("ernie45_vl", device="cpu"), 2, CALLS, 'no mm_encoder_tp_mode="data" for ERNIE'),
    ],
)
def test_bad_input(options: SessionOptions, ranks: int, calls: list[list[tuple[int, int, int]]], message: str) -> None:
    with pytest.raises(WorkbenchError, match=message):
        parallel._check(options, ranks, calls, gpus=1)


@pytest.mark.parametrize(
    ("options", "configuration", "call", "reason"),
    [
        (
            SessionOptions("glm4_1v", device="cpu", video_limit=1),
            Configuration((256,), 2, 4),
            [(8, 8, 8)] * 2,
            r"1 of 1 replays have up to 16 frames and the graphs hold 4: .*\(D4\)",
        ),
        (
            OPTIONS,
            Configuration((100,), 8),
            [(1, 20, 20)],
            r"1 of 1 replays have more tokens than their graph has room for: .*\(D3\)",
        ),
        (SessionOptions("ernie45_vl", device="cpu"), CONFIGURATION, [(1, 64, 64)], r"1 items above .*\(D1\)"),
    ],
)
def test_calls_on_which_vllm_fails_are_refused_before_anything_starts(
    tmp_path: Path, options: SessionOptions, configuration: Configuration, call: list[tuple[int, int, int]], reason: str
) -> None:
    def started(_: object) -> None:
        raise AssertionError("ranks were started")

    mode: Literal["data", "weights"] = "weights" if options.model == "ernie45_vl" else "data"
    with pytest.raises(WorkbenchError, match=f"call 1: {reason}"):
        run_parallel(options, configuration, [[(1, 4, 4)], call], 2, tmp_path / "o", tp_mode=mode, on_start=started)
    with pytest.raises(WorkbenchError, match="0 repeats measure nothing"):
        run_parallel(options, configuration, [[(1, 4, 4)]], 2, tmp_path / "o", tp_mode=mode, repeats=0)
    assert list(tmp_path.iterdir()) == []


def test_heads_that_ranks_cannot_share() -> None:
    options = SessionOptions("ernie45_vl", width=240, device="cpu")
    with pytest.raises(WorkbenchError, match="2 ranks cannot share 3 attention heads"):
        parallel._check(options, 2, CALLS, gpus=0, tp_mode="weights")
    with pytest.raises(WorkbenchError, match=r"3 ranks cannot share \d+ output features"):
        parallel._check(SessionOptions("glm4_1v", width=384, device="cpu"), 3, CALLS, gpus=0, tp_mode="weights")


def test_ernie_has_no_data_parallel_mode_in_vllm() -> None:
    from workbench.encoder import engine

    engine.require_vllm()
    from vllm.model_executor.models.ernie45_vl import Ernie4_5_VLMoeForConditionalGeneration
    from vllm.model_executor.models.glm4_1v import Glm4vForConditionalGeneration

    assert not getattr(Ernie4_5_VLMoeForConditionalGeneration, "supports_encoder_tp_data", False)
    assert Glm4vForConditionalGeneration.supports_encoder_tp_data


def test_ernies_gather_of_all_heads_gives_back_what_a_rank_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer of shared weights gathers q, k and v of all ranks and keeps this rank's: its own input."""
    import torch

    from workbench.encoder import engine

    engine.require_vllm()
    from vllm.model_executor.models import ernie45_vl

    size, heads, head = 2, 4, 8
    own = heads // size * head
    local = torch.randn(size, 5, 1, 3 * own)  # per rank: q, k, v of its heads

    def gathered(tensors: list[torch.Tensor], mine: torch.Tensor, group: object) -> None:
        for into, value in zip(tensors, local, strict=True):
            into.copy_(value)

    monkeypatch.setattr(torch.distributed, "all_gather", gathered)
    monkeypatch.setattr(
        ernie45_vl.parallel_state, "get_tp_group", lambda: type("Group", (), {"device_group": None})(), raising=True
    )
    attention = ernie45_vl.Ernie4_5_VisionAttention.__new__(ernie45_vl.Ernie4_5_VisionAttention)
    torch.nn.Module.__init__(attention)
    attention.tp_size = size
    attention.qkv = type("Linear", (), {"hidden_size": heads * head})()
    attention.num_attention_heads_per_partition = heads // size
    attention.hidden_size_per_attention_head = head
    for rank in range(size):
        attention.tp_rank = rank
        kept = attention.split_qkv(local[rank])
        had = local[rank].chunk(3, dim=-1)
        assert all(torch.equal(a.flatten(2), b) for a, b in zip(kept, had, strict=True))


def test_calls_are_written_in_pixels() -> None:
    calls, modality = parse_calls(["336x336*2,224x224", "896x448"], "glm4_1v")
    assert modality == "image"
    assert calls == [[(1, 24, 24)] * 2 + [(1, 16, 16)], [(1, 32, 64)]]
    assert parse_calls(["224x224x8"], "glm4_1v") == ([[(4, 16, 16)]], "video")


@pytest.mark.parametrize(
    "text", ["336", "336x", "336x336*99999", "336x336*0", "a", "336x336,224x224x8", "0x10", "30000x10"]
)
def test_calls_that_are_none(text: str) -> None:
    with pytest.raises(WorkbenchError):
        parse_calls([text], "glm4_1v")


@pytest.mark.parametrize(
    ("arguments", "gpus", "size"),
    [
        (("ernie45_vl", None, None, None), 0, (2, 160)),
        (("ernie45_vl", None, None, None), 1, (None, None)),
        (("ernie45_vl", None, None, "cpu"), 1, (2, 160)),
        (("ernie45_vl", None, None, "cuda:1"), 0, (None, None)),
        (("ernie45_vl", 32, None, "cpu"), 0, (32, 160)),
        (("ernie45_vl", 32, 1280, "cpu"), 0, (32, 1280)),
        (("glm4_1v", None, None, "cpu", 4), 0, (2, 512)),
        (("glm4_1v", None, None, "cpu", 99), 0, (2, 1536)),
    ],
)
def test_a_cpu_takes_a_small_encoder_and_says_so(
    arguments: Any, gpus: int, size: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("workbench.environment.gpus", lambda: [object()] * gpus)
    assert size_here(*arguments) == size
    assert ("--depth and --width" in capsys.readouterr().err) == (size not in ((None, None), (32, 1280)))


def test_the_verb_ends_with_2_before_anything_starts(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["parallel", "--call", "336x336", "--out", str(tmp_path / "o"), "--ranks", "1"])
    assert isinstance(result.exception, WorkbenchError)


def test_a_share_is_stored_strictly() -> None:
    with pytest.raises(msgspec.ValidationError, match="items"):
        msgspec.json.decode(b"{}", type=RankCall)
