-- Helper of busted under the sanitizers (busted --helper): the leak sanitizer looks when the
-- process ends, and can only name what is still loaded then. Lua would close its C modules before.
setmetatable(debug.getregistry()._CLIBS, nil)
-- And a leak ends the process without flushing: what busted reports must be out by then.
io.stdout:setvbuf("line")
