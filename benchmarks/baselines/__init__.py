"""What DDLF is compared with: each file is one alternative, with a function ``run(workload, **settings) -> Outcome``."""
