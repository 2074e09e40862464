"""The study of learning in its shortest form: every way trains, and what it took to the target is in the table."""

from benchmarks import learning


async def test_each_way_says_what_it_took_to_the_target(tmp_path, capsys):
    picture = tmp_path / "learning.png"
    said = "--data digits --rules average,gradient,async-10 --target 0.2 --epochs 4 --batch-size 16 --samples 400 --seeds 1"
    options = learning.parser().parse_args([*said.split(), "--plot", str(picture)])
    runs = await learning.main(options)
    assert [one["rule"] for one in runs] == ["average", "gradient", "async-10"]
    by = {one["rule"]: one["reached"] for one in runs}
    assert by["average"]["bytes"] < by["gradient"]["bytes"]
    assert all(point["seconds"] > 0 for one in runs for point in one["curve"])
    assert "| gradient | " in capsys.readouterr().out
    assert picture.stat().st_size > 1000
