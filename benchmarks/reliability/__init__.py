"""Long runs that try to break promises: each module is a script, and its short form is among the tests."""
