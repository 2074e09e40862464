"""Bad inputs, by number: each gets one sentence that names the thing, the bad value, the expected form and the next step.

The numbers are those of the project's list. Rows that belong to one part of the code are with its tests: checkpoints (B16, B108-B118), liveness
(B28), certificates (B37), and of the wire (B60-B95) those of single bytes:

    B60-B71  each bit of the handshake                   tests/rpc/test_handshake.py
    B63      encryption                                  tests/rpc/test_tls.py
    B72-B81  headers; B86 sizes                          tests/rpc/test_frame.py, whose table test_wire.py says to a real port
    B78-B87  values                                      tests/rpc/test_values.py
    B90      code that cannot be loaded                  tests/rpc/test_code.py
    B92      results that a master does not read         tests/end_to_end/test_faults.py, tests/worker/test_worker.py
    B94      a request with the key of another lease     tests/end_to_end/test_faults.py, tests/worker/test_lease.py
    B95      any cutting of the stream                   tests/rpc/test_frame.py, tests/rpc/test_connection.py

    B103     CSV files; B104 pictures                    tests/data/test_sources.py, tests/data/test_formats.py

The wire compresses no bytes, so B91 has no test.
"""
