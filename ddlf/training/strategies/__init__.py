"""The strategies of training. Each strategy is one package, and none imports another."""
