"""Tests of lines that a server of peers says again and again."""

from itertools import pairwise

from ddlf.peers.said_lately import Rarely, SaidLately


def test_of_the_lines_about_one_subject_one_is_said_in_a_minute():
    lines = []
    lately = SaidLately(lines.append)
    for second in range(121):
        lately.say(f"post {second} of peer 1", "posts", 1, now=1000.0 + second)
    assert lines == ["post 0 of peer 1", "post 60 of peer 1", "post 120 of peer 1"]


def test_a_line_about_one_subject_delays_no_line_about_another():
    lines = []
    lately = SaidLately(lines.append)
    for line, *subject in (("a post", "posts", 1), ("a post", "posts", 2), ("a quota", "quota", 1), ("a disk", "file")):
        lately.say(line, *subject, now=1000.0)
    assert lines == ["a post", "a post", "a quota", "a disk"]


def test_a_line_of_each_second_becomes_rare_in_a_long_run():
    rarely = Rarely(1000.0)
    seconds = [second for second in range(3600) if rarely.is_due(1000.0 + second)]
    assert seconds[:12] == [*range(11), 12]
    assert 60 < len(seconds) < 120
    assert max(b - a for a, b in pairwise(seconds)) == 60
