"""What happens when processes, machines and networks fail: long runs, each with a short form in the tests."""
