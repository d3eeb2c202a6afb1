-- The readers on broken files, many rounds each.
assert(loadfile("tests/lua/fuzz_spec.lua", "t", _ENV))(5000)
