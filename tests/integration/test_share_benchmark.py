"""Tests of the benchmark of weights in shares, on shares small enough for a test."""

import json
import re
from pathlib import Path

import pytest

from async_flowrl.plan.cards import Assumptions
from benchmarks.share_ends import SendingRank, TakingWorker, whole_layout
from benchmarks.share_report import predicted
from benchmarks.shares import main
from checkpoint_engine.shards import shard_layout


@pytest.mark.usefixtures("ray_here")
def test_it_writes_its_table_into_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the cluster of this process."""
    page, out = tmp_path / "page.md", tmp_path / "out.json"
    page.write_text("before\n<!-- shares: begin -->\nold\n<!-- shares: end -->\nafter\n")
    sizes = ["--megabytes", "0.5", "--receivers", "1", "--repeats", "1"]
    main([*sizes, "--bucket", "150000", "--page", str(page), "--out", str(out)])
    printed = capsys.readouterr().out
    result = json.loads(out.read_text(encoding="utf-8"))
    (cell,) = result["cells"]
    assert cell["fraction"] == cell["primitive_seconds"] / cell["delivery_seconds"] > 0.0
    assert cell["fraction_of_gloo"] == cell["gloo_seconds"] / cell["delivery_seconds"] > 0.0
    assert cell["stall_copies"] > 0.0 and cell["publish_copies"] > 0.0 and cell["activate_seconds"] > 0.0
    before, written, after = re.split(r"<!-- shares: (?:begin|end) -->", page.read_text())
    assert (before, after) == ("before\n", "\nafter\n")
    # Ray prints there, too, e.g. that a worker of another test has died.
    assert written.startswith("\n\n| MB |") and written.strip() in printed
    assert "| 0.5 | 1 |" in printed and "no prediction" in printed and result["skipped"] == []
    page.write_text("no markers")
    with pytest.raises(ValueError, match="has no place for shares"):
        main(["--read", str(out), "--page", str(page)])


def test_the_primitive_writes_every_share_to_a_place_of_its_own() -> None:
    """Also of shares that are not of one size."""
    whole, bucket = whole_layout(0.5), 100_000
    ranks = [SendingRank(index, f"trainer-{index}", 2, 0.5) for index in range(2)]
    worker = TakingWorker(0, "rollout-0", 0.5)
    sizes = [shard_layout(whole, 2, index).nbytes for index in range(2)]
    assert sizes[0] > sizes[1] and sum(sizes) == whole.nbytes
    for shard, rank in enumerate(ranks):
        rank.train(shard + 1)
        for start in range(0, sizes[shard], bucket):
            worker.take_raw(sizes, shard, start, rank.raw(0, start, bucket)[1])
    shares = worker.buffer.split(sizes)
    assert [share.unique().tolist() for share in shares] == [[1], [2]]


def row(megabytes: float, receivers: int, *, delivery: float, fraction: float) -> dict[str, float]:
    return {"megabytes": megabytes, "receivers": receivers, "delivery_seconds": delivery, "fraction": fraction}


def test_the_prediction_takes_the_slower_of_network_and_host() -> None:
    cells = [
        row(50, 1, delivery=1.0, fraction=0.1),
        row(1000, 1, delivery=0.1, fraction=0.9),  # 10 GB/s
        row(1000, 4, delivery=0.5, fraction=0.5),
    ]
    host, slow, fast = predicted(cells, Assumptions(host_bytes_per_second=50e9))
    assert "4.1 s at the 10.0 GB/s of 1000 MB to one receiver" in host
    assert (
        "takes 6.6 s at the fraction 0.50 of 1000 MB to 4: 6.6 s of delivery" in slow and "0.8 s of activation" in slow
    )
    assert "takes 1.6 s at the fraction 0.50 of 1000 MB to 4: 4.1 s of delivery" in fast
    assert predicted(cells[:2], Assumptions()) == ["no prediction: it needs deliveries to 1 and to 4 receivers"]
