std = "lua54"
max_line_length = 100
codes = true
-- An unused argument named _ or _something says so itself.
ignore = { "212/_.*", "212/self", "213/_.*" }
files["tests"] = { std = "+busted" }
exclude_files = { "build" }
