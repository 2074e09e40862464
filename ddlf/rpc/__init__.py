"""Remote calls: frames and values on the wire, the handshake, TLS, connections. Both sides use it."""
