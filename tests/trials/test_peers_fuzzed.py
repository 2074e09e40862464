"""Run the short form of the fuzz trial of peers."""

from tests.trials.peers_fuzzed import main


async def test_broken_input_to_a_server_of_peers_is_refused_and_harms_nobody():
    await main(800, 32, "bfloat16")
