"""What strangers and distance cost: floods, guesses, encryption, two machines. Each module is a script."""
