"""Bad inputs, by number: each gets one sentence that names the thing, the bad value, the expected form and the next step.

The numbers are those of the project's list. Rows that belong to one part of the code are with its tests: checkpoints (B16, B108-B118), liveness
(B28), certificates (B37), the wire (B60-B95). There is no reader of CSV files or pictures, so B103 and B104 have nothing to test.
"""
