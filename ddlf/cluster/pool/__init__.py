"""``Pool``, which lets synchronous programs, without ``await``, call functions on workers."""
