-- The verbs of the program: generate, export, eval, tokenize, verify, diff, replay, ctl, test,
-- plot. Each takes the words that follow it and returns the exit status: 0 done, 1 failed, 2 wrong
-- usage.
local xt = require "xtrain"
local options = require "xtrain.options"

local M = {}

local DONE, FAILED, USAGE = 0, 1, 2

-- ---- words -------------------------------------------------------------------------------------

local function complain(message, status)
  io.stderr:write("xtrain ", message, "\n")
  return nil, status
end

-- Words -> the plain ones as a list, and {name = value} of --name value, typed after `flags` (name
-- = default or options.required or options.optional). Names are written with - for _.
-- On wrong usage: nil, status, after saying what is wrong.
local function parse(verb, usage, words, flags, least)
  local plain, given = {}, {}
  local function wrong(format, ...)
    return complain(("%s: %s\nusage: xtrain %s %s"):format(verb, format:format(...), verb, usage),
      USAGE)
  end
  local i = 1
  while i <= #words do
    local word = words[i]
    local name, value = word:match("^%-%-([%w-]+)=?(.*)$")
    if name then
      local key = name:gsub("-", "_")
      local default = flags[key]
      if default == nil then
        local nearest = options.nearest(key, options.names(flags))
        return wrong("there is no --%s%s", name,
          nearest and "; did you mean --" .. nearest:gsub("_", "-") .. "?" or "")
      end
      if not word:find("=", 1, true) then
        i = i + 1
        value = words[i]
        if value == nil then return wrong("--%s wants a value", name) end
      end
      if type(default) == "number" then
        local number = tonumber(value)
        if math.type(default) == "integer" then number = math.tointeger(number) end
        if not number then return wrong("--%s is '%s', wanted a number", name, value) end
        value = number
      end
      given[key] = value
    else
      plain[#plain + 1] = word
    end
    i = i + 1
  end
  for key, default in pairs(flags) do
    if given[key] == nil then
      if default == options.required then return wrong("--%s is missing", (key:gsub("_", "-"))) end
      if default ~= options.optional then given[key] = default end
    end
  end
  if #plain < least then return wrong("a word is missing") end
  return plain, given
end

-- ---- models and tokenizers ----------------------------------------------------------------------

-- A save, a run folder or a Hugging Face folder -> {model, tokenizer path, seq, name}; or nil,
-- message.
local function open_model(dir, opts)
  local file, save = require "xtrain.core.file", require "xtrain.save"
  dir = #dir > 1 and dir:gsub("/+$", "") or dir
  if not file.exists(dir) and not dir:match("/latest$") and not dir:match("/best$") then
    return nil, dir .. ": there is no such folder"
  end
  if save.find(dir) then
    local model, info, found = save.load_model(dir, opts)
    if not model then return nil, info end
    local run_folder = found:match("^(.*)/[^/]+$") or "."
    return { model = model, tokenizer = run_folder .. "/tokenizer.json", seq = info.options.seq,
      name = found }
  end
  local model, config = require("xtrain.hf").load(dir, opts)
  if not model then return nil, config end
  return { model = model, tokenizer = dir, name = dir }
end

local function open_tokenizer(path, opened)
  local chosen = path or opened.tokenizer
  local tokenizer, message = xt.tokenizer.load(chosen)
  if not tokenizer then
    return nil, ("%s (--tokenizer PATH names another one)"):format(tostring(message))
  end
  return tokenizer
end

-- "auto" becomes nothing.
local function filters(o)
  return { max = o.max, temperature = o.temperature, seed = o.seed,
    top_k = o.top_k > 0 and o.top_k or nil, top_p = o.top_p < 1 and o.top_p or nil,
    min_p = o.min_p > 0 and o.min_p or nil }
end

-- ---- generate -----------------------------------------------------------------------------------

-- xtrain generate DIR --prompt TEXT: continues a text, printing it as it comes.
function M.generate(words)
  local usage = "DIR --prompt TEXT [--max N --temperature T --seed S --top-k N --top-p P --min-p P "
    .. "--tokenizer PATH --dtype f32|bf16]"
  local plain, o = parse("generate", usage, words, { prompt = options.required, max = 200,
    temperature = 0.8, seed = 1, top_k = 0, top_p = 1.0, min_p = 0.0,
    tokenizer = options.optional, dtype = "f32" }, 1)
  if not plain then return o end
  local opened, message = open_model(plain[1], { dtype = o.dtype })
  if not opened then return select(2, complain("generate: " .. message, FAILED)) end
  local tokenizer
  tokenizer, message = open_tokenizer(o.tokenizer, opened)
  if not tokenizer then return select(2, complain("generate: " .. message, FAILED)) end
  local ids = tokenizer:encode(o.prompt)
  if #ids == 0 then
    return select(2, complain("generate: --prompt is empty: give it a word to begin with", USAGE))
  end
  io.stdout:write(o.prompt)
  local stream = tokenizer:stream()
  local how = filters(o)
  how.on_token = function(id)
    io.stdout:write(stream:add(id))
    io.stdout:flush()
    return not xt.interrupted()
  end
  xt.generate(opened.model, ids, how)
  io.stdout:write(stream:finish(), "\n")
  return DONE
end

-- ---- export -------------------------------------------------------------------------------------

-- xtrain export RUN OUT: a Hugging Face folder.
function M.export(words)
  local plain, o = parse("export", "RUN OUT [--dtype bf16|f16|f32 --tokenizer PATH]", words,
    { dtype = "bf16", tokenizer = options.optional }, 2)
  if not plain then return o end
  local file = require "xtrain.core.file"
  local opened, message = open_model(plain[1])
  if not opened then return select(2, complain("export: " .. message, FAILED)) end
  local ok
  ok, message = require("xtrain.hf").save(plain[2], opened.model, nil, { dtype = o.dtype })
  if not ok then return select(2, complain("export: " .. tostring(message), FAILED)) end
  local path = o.tokenizer or opened.tokenizer
  if file.exists(path) == "folder" then path = path .. "/tokenizer.json" end
  if file.exists(path) then
    ok, message = file.write_atomic(plain[2] .. "/tokenizer.json", (file.read(path)))
    if not ok then return select(2, complain("export: " .. tostring(message), FAILED)) end
  end
  print(("%s -> %s (%s)"):format(opened.name, plain[2], o.dtype))
  return DONE
end

-- ---- eval ---------------------------------------------------------------------------------------

-- Mean loss over a text in windows of seq tokens, all of it: sum of nats, tokens predicted.
local function text_loss(model, ids, seq)
  local sum, count = 0.0, 0
  xt.evaluating(model, function()
    for first = 1, #ids - 1, seq do
      local last = math.min(first + seq - 1, #ids - 1)
      local x = xt.tensor({ table.move(ids, first, last, 1, {}) }, { dtype = "i32" })
      local y = xt.tensor({ table.move(ids, first + 1, last + 1, 1, {}) }, { dtype = "i32" })
      local loss, valid = model:loss(x, y, { reduction = "sum" })
      if type(valid) ~= "number" then valid = valid:item() end
      sum, count = sum + loss:item(), count + valid
      xt.collect()
    end
  end)
  return sum, count
end

-- xtrain eval DIR FILE...: mean loss, perplexity, bits a byte.
function M.eval(words)
  local plain, o = parse("eval", "DIR FILE... [--seq N --tokenizer PATH]", words,
    { seq = 0, tokenizer = options.optional }, 2)
  if not plain then return o end
  local file = require "xtrain.core.file"
  local opened, message = open_model(plain[1])
  if not opened then return select(2, complain("eval: " .. message, FAILED)) end
  local tokenizer
  tokenizer, message = open_tokenizer(o.tokenizer, opened)
  if not tokenizer then return select(2, complain("eval: " .. message, FAILED)) end
  local seq = o.seq > 0 and o.seq or opened.seq or 256
  for i = 2, #plain do
    local text
    text, message = file.read(plain[i])
    if not text then return select(2, complain("eval: " .. message, FAILED)) end
    local ids = tokenizer:encode(text)
    if #ids < 2 then
      return select(2, complain(("eval: %s: fewer than two tokens"):format(plain[i]), FAILED))
    end
    local sum, count = text_loss(opened.model, ids, seq)
    local loss = sum / count
    print(("%s: loss %.4f, perplexity %.2f, %.4f bits/byte, %d tokens, %d bytes"):format(plain[i],
      loss, math.exp(loss), loss * #ids / #text / math.log(2), #ids, #text))
  end
  return DONE
end

-- ---- tokenize -----------------------------------------------------------------------------------

-- What follows the last line end at or after `first`: the line, and where the next one begins.
local function next_line(text, first)
  local ends = text:find("\n", first, true) or #text + 1
  return text:sub(first, ends - 1), ends + 1
end

-- Calls fn(document) for the `text` of each line of JSONL, or for all of a text. Returns true, or
-- nil, message.
local function each_document(path, text, format, fn)
  if format == "auto" then format = path:find("%.jsonl") and "jsonl" or "text" end
  if format == "text" then
    fn(text)
    return true
  end
  local json = require "xtrain.core.json"
  local first, number = 1, 0
  while first <= #text do
    local line
    line, first = next_line(text, first)
    number = number + 1
    if line:find("%S") then
      local ok, row = pcall(json.decode, line)
      if not ok or type(row) ~= "table" or type(row.text) ~= "string" then
        return nil, ("%s: line %d is no object with a string 'text'"):format(path, number)
      end
      fn(row.text)
    end
  end
  return true
end

-- Where the ids of a file go: its name without .gz, .zst and one more ending.
local function shard_name(path)
  if path == "-" then return "stdin" end
  local name = path:match("[^/]+$"):gsub("%.gz$", ""):gsub("%.zst$", "")
  return (name:gsub("(.)%.%w+$", "%1"))
end

-- paths -> shard paths, or nil, message where two would be one.
local function shard_paths(paths, dir)
  local shards, taken = {}, {}
  for i, path in ipairs(paths) do
    local shard = ("%s/%s.bin"):format(dir, shard_name(path))
    if taken[shard] then
      return nil, ("%s and %s would both go to %s"):format(taken[shard], path, shard)
    end
    shards[i], taken[shard] = shard, path
  end
  return shards
end

-- Ids of all documents of a file as they lie in a shard, and how many bytes of text they were; or
-- nil, message.
local function file_ids(tokenizer, path, ending, format)
  local text, message = require("xtrain.core.file").read(path)
  if not text then return nil, message end
  local parts, bytes = {}, 0
  local ok
  ok, message = each_document(path, text, format, function(document)
    parts[#parts + 1] = ending
    parts[#parts + 1] = (tokenizer:encode_bytes(document))
    bytes = bytes + #document
  end)
  if not ok then return nil, message end
  return table.concat(parts), bytes
end

-- xtrain tokenize --tokenizer T --out DIR FILE...: one token shard a file. A file is text or, when
-- its name says so, JSONL; gzip and zstd are unpacked; - is standard input.
function M.tokenize(words)
  local plain, o = parse("tokenize",
    "--tokenizer T --out DIR FILE... [--end TOKEN --format auto|text|jsonl]", words,
    { tokenizer = options.required, out = options.required, ["end"] = "<|endoftext|>",
      format = "auto" }, 1)
  if not plain then return o end
  local function failed(message) return select(2, complain("tokenize: " .. message, FAILED)) end
  local function wrong(message) return select(2, complain("tokenize: " .. message, USAGE)) end
  if o.format ~= "auto" and o.format ~= "text" and o.format ~= "jsonl" then
    return wrong(("--format is '%s', wanted auto, text or jsonl"):format(o.format))
  end
  local targets, message = shard_paths(plain, o.out)
  if not targets then return wrong(message) end
  local tokenizer, ok
  tokenizer, message = xt.tokenizer.load(o.tokenizer)
  if not tokenizer then return failed(message) end
  ok, message = require("xtrain.core.file").mkdir(o.out)
  if not ok then return failed(message) end
  -- Where the vocabulary has a token that ends a document, each document begins with it.
  local ending, width = tokenizer:encode_bytes(o["end"], { special = true })
  if #ending ~= width then ending = "" end
  for i, path in ipairs(plain) do
    local ids, bytes = file_ids(tokenizer, path, ending, o.format)
    if not ids then return failed(bytes) end
    ok, message = require("xtrain.core.data").write(targets[i], ids, width)
    if not ok then return failed(tostring(message)) end
    local count = #ids // width
    print(("%s: %d tokens, %.3f bytes a token"):format(targets[i], count,
      bytes / math.max(count, 1)))
  end
  return DONE
end

-- ---- verify, diff ------------------------------------------------------------------------------

-- Prints what the comparison found; with something else than equality, on standard error.
local function tell(verb, same, text)
  if same then
    print(text)
    return DONE
  end
  return select(2, complain(verb .. ": " .. text, FAILED))
end

-- xtrain verify RUN: checks the saves of a run, and makes its last saved interval again.
function M.verify(words)
  local plain, status = parse("verify", "RUN", words, {}, 1)
  if not plain then return status end
  return tell("verify", require("xtrain.verify").verify(plain[1]))
end

-- xtrain diff RUN RUN: the first step at which two runs part.
function M.diff(words)
  local plain, status = parse("diff", "RUN RUN", words, {}, 2)
  if not plain then return status end
  return tell("diff", require("xtrain.verify").diff(plain[1], plain[2]))
end

-- ---- replay ------------------------------------------------------------------------------------

-- xtrain replay RUN --step N [--prompt]: makes a step of a saved run again, or opens the prompt
-- right before it.
function M.replay(words)
  local rest, prompt = {}, false
  for _, word in ipairs(words) do
    if word == "--prompt" then prompt = true else rest[#rest + 1] = word end
  end
  local plain, o = parse("replay", "RUN --step N [--prompt]", rest, { step = 0 }, 1)
  if not plain then return o end
  if o.step < 1 then return select(2, complain("replay: --step N is missing, N from 1", USAGE)) end
  local enter = prompt and require("xtrain.stop").stand or nil
  local same, text = require("xtrain.replay").step(plain[1], o.step, enter)
  if same == nil then return select(2, complain("replay: " .. text, FAILED)) end
  return prompt and DONE or tell("replay", same, text)
end

-- ---- ctl ---------------------------------------------------------------------------------------

local WORDS = { eval = 2, save = 2, stop = 2, set = 4 } -- how many, with run and command

-- xtrain ctl RUN eval|save|stop|set KEY VALUE: asks a run that goes on, in another terminal.
function M.ctl(words)
  local usage = "RUN eval|save|stop|set KEY VALUE"
  local function wrong(format, ...)
    local message = format:format(...)
    return select(2, complain(("ctl: %s\nusage: xtrain ctl %s"):format(message, usage), USAGE))
  end
  local run, command, key, value = table.unpack(words)
  if not command then return wrong("a word is missing") end
  if not WORDS[command] then
    local nearest = options.nearest(command, options.names(WORDS))
    return wrong("there is no command '%s'%s", command,
      nearest and ("; did you mean %s?"):format(nearest) or "")
  end
  if #words ~= WORDS[command] then
    local wanted = command == "set" and "a key and a value" or "no more words"
    return wrong("%s wants %s", command, wanted)
  end
  run = #run > 1 and run:gsub("/+$", "") or run
  local text, message = require("xtrain.ctl").ask(run,
    { command = command, key = key, value = value },
    function(told) io.stderr:write("xtrain ctl: ", told, "\n") end)
  if not text then return select(2, complain("ctl: " .. message, FAILED)) end
  print(text)
  return DONE
end

-- ---- test --------------------------------------------------------------------------------------

-- xtrain test [PATH...]: runs specs.
function M.test(words)
  local plain, o = parse("test", "[PATH...] [--filter PATTERN]", words,
    { filter = options.optional }, 0)
  if not plain then return o end
  local spec_run = require "xtrain.spec_run"
  local files, message = spec_run.files(plain)
  if not files then return select(2, complain("test: " .. message, USAGE)) end
  return spec_run.run(files, o.filter) and DONE or FAILED
end

-- ---- plot --------------------------------------------------------------------------------------

-- xtrain plot RUN...: loss, learning rate and gradient norm, here and as one HTML page.
function M.plot(words)
  local plain, o = parse("plot", "RUN... [--out PAGE.html]", words, { out = options.optional }, 1)
  if not plain then return o end
  local file = require "xtrain.core.file"
  local text, out = require("xtrain.plot").plot(plain,
    { out = o.out, columns = file.columns(), colour = file.isatty(1) })
  if not text then return select(2, complain("plot: " .. out, FAILED)) end
  print(text)
  print("the page: " .. out)
  return DONE
end

return M
