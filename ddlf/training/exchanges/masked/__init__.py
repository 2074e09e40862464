"""The star exchange with secure aggregation: workers add up their updates under masks, so the master learns only the sum."""
