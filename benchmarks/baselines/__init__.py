"""The alternatives to DDLF. Each file has one alternative, with ``run(workload, **settings) -> Outcome``."""
