"""What a slot keeps between rounds: a file for each."""
