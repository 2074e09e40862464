"""The strategies: how a run trains. Each is one package, and none imports another."""
