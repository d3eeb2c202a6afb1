-- What a run logs, for people: TensorBoard's event file and xtrain plot.
local xt = require "xtrain"
local events = require "xtrain.events"
local file = require "xtrain.core.file"
local plot = require "xtrain.plot"
local training = require "training"

local dir

before_each(function()
  dir = os.tmpname()
  os.remove(dir)
  assert(file.mkdir(dir))
end)

after_each(function() file.remove_tree(dir) end)

-- ---- a reader of event files, by the format's description alone ---------------------------------

local function varint(bytes, at)
  local value, shift = 0, 0
  while true do
    local byte = bytes:byte(at)
    value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
    if byte < 0x80 then return value, at end
  end
end

-- Protocol buffers -> {{number, value}, ...}: varints, 64 and 32 bits, bytes.
local function fields(bytes)
  local list, at = {}, 1
  while at <= #bytes do
    local key, value
    key, at = varint(bytes, at)
    local kind = key & 7
    if kind == 0 then
      value, at = varint(bytes, at)
    elseif kind == 1 then
      value, at = ("<d"):unpack(bytes, at)
    elseif kind == 5 then
      value, at = ("<f"):unpack(bytes, at)
    else
      local length
      length, at = varint(bytes, at)
      value, at = bytes:sub(at, at + length - 1), at + length
    end
    list[#list + 1] = { key >> 3, value }
  end
  return list
end

-- {step, version = ..., values = {name = value}} of each event. Checks every CRC.
local function read_events(text)
  local function mask(crc) return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF end
  local list, at = {}, 1
  while at <= #text do
    local length, check = ("<I8I4"):unpack(text, at)
    assert.are.equal(mask(events.crc32c(text:sub(at, at + 7))), check)
    local bytes = text:sub(at + 12, at + 11 + length)
    assert.are.equal(mask(events.crc32c(bytes)), (("<I4"):unpack(text, at + 12 + length)))
    local event = { values = {} }
    for _, field in ipairs(fields(bytes)) do
      if field[1] == 1 then event.time = field[2] end
      if field[1] == 2 then event.step = field[2] end
      if field[1] == 3 then event.version = field[2] end
      if field[1] == 5 then
        for _, value in ipairs(fields(field[2])) do
          assert.are.equal(1, value[1])
          local parts = fields(value[2])
          event.values[parts[1][2]] = parts[2][2]
        end
      end
    end
    list[#list + 1] = event
    at = at + 16 + length
  end
  return list
end

describe("event files", function()
  it("have the check sums of their format", function()
    -- RFC 3720, B.4
    assert.are.equal(0xE3069283, events.crc32c "123456789")
    assert.are.equal(0x8A9136AA, events.crc32c(("\0"):rep(32)))
    assert.are.equal(0x62A8AB43, events.crc32c(("\xFF"):rep(32)))
  end)

  it("hold every number of a row, behind the version", function()
    assert(events.append(dir, { step = 1, loss = 2.5, digest = "0x1" }))
    assert(events.append(dir, { step = 300, loss = 0.125, lr = 1e-3, tokens = 70000 }))
    local list = read_events(assert(file.read(dir .. "/" .. events.NAME)))
    assert.are.equal(3, #list)
    assert.are.equal("brain.Event:2", list[1].version)
    assert.are.same({ loss = 2.5 }, list[2].values)
    assert.are.equal(1, list[2].step)
    assert.are.equal(300, list[3].step)
    assert.is_near(1e-3, list[3].values.lr, 1e-10)
    assert.are.equal(70000, list[3].values.tokens)
    assert.is_true(list[3].time > 1.7e9)
  end)

  it("are cut back to a step, and lose what a kill has left of a last event", function()
    for step = 1, 5 do assert(events.append(dir, { step = step, loss = step })) end
    local path = dir .. "/" .. events.NAME
    local whole = assert(file.read(path))
    for cut = 1, 30 do
      assert(file.write_atomic(path, whole:sub(1, -cut - 1)))
      assert(events.cut(dir, 9))
      assert.are.equal(5, #read_events(assert(file.read(path))), "cut by " .. cut)
    end
    assert(file.write_atomic(path, whole))
    assert(events.cut(dir, 3))
    local list = read_events(assert(file.read(path)))
    assert.are.equal(4, #list)
    assert.are.equal(3, list[4].step)
    assert(file.write_atomic(path, whole:sub(1, 60) .. "x" .. whole:sub(62)))
    assert(events.cut(dir, 9)) -- what follows a damaged event cannot be told
    assert.is_true(#read_events(assert(file.read(path))) < 6)
    assert.is_true(events.cut(dir .. "/none", 3))
  end)
end)

-- ---- plots -------------------------------------------------------------------------------------

-- A run folder as far as a plot needs it.
local function log(name, rows)
  assert(file.mkdir(dir .. "/" .. name))
  local lines = {}
  for i, row in ipairs(rows) do lines[i] = xt.json.encode(row) .. "\n" end
  assert(file.write_atomic(("%s/%s/metrics.jsonl"):format(dir, name), table.concat(lines)))
  return dir .. "/" .. name
end

local function falling(count)
  local rows = {}
  for i = 1, count do rows[i] = { step = i, loss = 4 / i, lr = 1e-3 * i, grad_norm = 1 } end
  return rows
end

describe("xtrain plot", function()
  it("draws each chart from its top left to its bottom right", function()
    local text = assert(plot.plot({ log("a", falling(100)) }, { columns = 60 }))
    local lines = {}
    for line in text:gmatch "[^\n]+" do lines[#lines + 1] = line end
    assert.are.equal("loss", lines[1])
    assert.matches("^ +4 ", lines[2])
    assert.matches("^ +0.04 ", lines[11])
    assert.matches("^ +1 +step 100$", lines[12])
    assert.are.equal("learning rate", lines[13])
    local blank = utf8.char(0x2800)
    local top, bottom = lines[2]:sub(12), lines[11]:sub(12)
    assert.are_not.equal(blank, top:sub(1, 3)) -- the loss begins at the top
    assert.are.equal(blank, top:sub(-3))
    assert.are_not.equal(blank, bottom:sub(-3)) -- and ends at the bottom
    for i = 2, 11 do assert.are.equal(48, utf8.len(lines[i]:sub(12))) end
    assert.matches("a  loss 0.04  lr 0.1  grad_norm 1$", text)
    assert.is_nil(text:find "\27")
    assert.matches("\27%[31m", (plot.plot({ log("b", falling(3)), dir .. "/a" }, { colour = true,
      out = dir .. "/both.html" })))
  end)

  it("writes one page with a line for each run, and nothing from elsewhere", function()
    local a = log("a", falling(20))
    local b = log("b<i>", { { step = 2, loss = 3 }, { step = 4, loss = 0 / 0 },
      { step = 6, loss = 2, held_out = 2.5 } })
    assert(file.write_atomic(a .. "/edits.jsonl", xt.json.encode { step = 5, path = "live.lua",
      diff = "@ 1\n-lr = 1\n+lr = 2", hash = "", text = "" } .. "\n"))
    local _, out = assert(plot.plot({ a, b }, { out = dir .. "/page.html" }))
    assert.are.equal(dir .. "/page.html", out)
    local page = assert(file.read(out))
    local _, charts = page:gsub("<svg", "")
    assert.are.equal(3, charts)
    local _, lines = page:gsub("<polyline", "")
    assert.are.equal(5, lines) -- three of a, loss and held-out loss of b
    assert.matches('class="line dots"', page)
    assert.matches("b&lt;i&gt;", page)
    assert.is_nil(page:match("<body>(.*)<script>"):find("b<i>", 1, true))
    assert.is_truthy(page:find("<title>step 5 of " .. a .. ": live.lua\n@ 1\n-lr = 1\n+lr = 2",
      1, true))
    for _, elsewhere in ipairs { "http:", "https:", "src=", "href=", "@import", "url%(" } do
      assert.is_nil(page:find(elsewhere), elsewhere)
    end
    assert.is_nil(page:find "nan")
    assert.are.equal(a .. "/plot.html", select(2, assert(plot.plot { a })))
  end)

  it("keeps peaks when it leaves points out", function()
    local points = {}
    for i = 1, 10000 do points[i] = { i, i == 5003 and 9 or i == 7001 and -9 or 0 } end
    local thin = plot.thin(points, 100)
    assert.is_true(#thin <= 100)
    local low, high = 0, 0
    for i, p in ipairs(thin) do
      low, high = math.min(low, p[2]), math.max(high, p[2])
      assert.is_true(i == 1 or p[1] > thin[i - 1][1])
    end
    assert.are.equal(9, high)
    assert.are.equal(-9, low)
  end)

  it("has round numbers at its axes", function()
    assert.are.same({ 0.0, 20.0, 40.0, 60.0, 80.0, 100.0 }, plot.ticks(0, 100, 5))
    local ticks = plot.ticks(0.013, 0.048, 4)
    assert.are.equal(3, #ticks)
    assert.is_near(0.02, ticks[1], 1e-12)
  end)

  it("says what it cannot draw", function()
    local function says(path, part)
      local text, message = plot.plot { path }
      assert.is_nil(text)
      assert.is_truthy(message:find(part, 1, true), message)
    end
    says(dir .. "/none", "none: there is no such folder")
    says(dir, "metrics.jsonl: no step is logged")
    says(log("c", { { step = 1, speed = 3 } }), "neither loss nor learning rate")
  end)
end)

-- ---- of a run ----------------------------------------------------------------------------------

describe("a run", function()
  it("has an event file that a resume cuts back, and is plotted", function()
    if not training.program then return pending "XTRAIN does not name the program" end
    training.in_place("log_every=2 save_every=4", function(place)
      local script = training.recipe:gsub("tiny", "mlp")
      place:must("out=a steps=8", script)
      local function rows()
        local list = {}
        for _, event in ipairs(read_events(place:read("a/" .. events.NAME))) do
          event.time, event.values.tokens_per_s = nil, nil
          list[#list + 1] = event
        end
        return list
      end
      local before = rows()
      assert.are.equal(6, #before) -- the version, steps 1 2 4 6 8
      assert.is_truthy(before[6].values.loss and before[6].values.lr)
      place:must("out=a steps=8 resume=a/step-00000004", script)
      assert.are.same(before, rows())
      local _, _, code = os.execute(("cd '%s' && '%s' plot a >said 2>&1"):format(place.dir,
        training.program))
      assert.are.equal(0, code)
      assert.matches("the page: a/plot.html\n$", place:read "said")
      assert.are.equal("file", file.exists(place.dir .. "/a/plot.html"))
      for words, status in pairs { ["plot"] = 2, ["plot nothing"] = 1 } do
        _, _, code = os.execute(("cd '%s' && '%s' %s >said 2>&1"):format(place.dir,
          training.program, words))
        assert.are.equal(status, code)
      end
    end)
  end)
end)
