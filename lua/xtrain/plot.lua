-- xtrain plot RUN...: loss, learning rate and gradient norm of runs, drawn in the terminal and as
-- one HTML page that needs nothing besides itself.
local edits = require "xtrain.edits"
local options = require "xtrain.options"
local replay = require "xtrain.replay"
local file = require "xtrain.core.file"
local json = require "xtrain.core.json"

local M = {}

-- What is drawn: a chart each; `dots` is drawn as points joined by a dashed line.
local CHARTS = {
  { title = "loss", line = "loss", dots = "held_out" },
  { title = "learning rate", line = "lr" },
  { title = "gradient norm", line = "grad_norm" },
}

-- ---- what is drawn -----------------------------------------------------------------------------

local function is_finite(x)
  return type(x) == "number" and x == x and x ~= math.huge and x ~= -math.huge
end

-- {step, value} of the rows that have a finite value of this name.
local function points_of(rows, name)
  local points = {}
  for _, row in ipairs(rows) do
    if name and is_finite(row[name]) then points[#points + 1] = { row.step, row[name] } end
  end
  return points
end

local MOST_POINTS = 1500 -- of a line

-- At most so many points: of each stretch the lowest and the highest, so that no peak is lost.
function M.thin(points, most)
  if #points <= most then return points end
  local out, stretches = {}, most // 2
  for i = 0, stretches - 1 do
    local first, last = i * #points // stretches + 1, (i + 1) * #points // stretches
    local low, high = first, first
    for j = first, last do
      if points[j][2] < points[low][2] then low = j end
      if points[j][2] > points[high][2] then high = j end
    end
    out[#out + 1] = points[math.min(low, high)]
    if low ~= high then out[#out + 1] = points[math.max(low, high)] end
  end
  return out
end

-- A run: {name, rows, edits}; or nil, message.
local function read(run)
  run = #run > 1 and run:gsub("/+$", "") or run
  if file.exists(run) ~= "folder" then return nil, run .. ": there is no such folder" end
  local rows = replay.rows(run)
  if #rows == 0 then return nil, run .. "/metrics.jsonl: no step is logged" end
  local changes = {}
  for _, row in ipairs(edits.read(run)) do
    if row.set then
      changes[#changes + 1] = { row.step, ("set %s = %s"):format(row.set, tostring(row.value)) }
    elseif row.diff ~= "" then
      changes[#changes + 1] = { row.step, ("%s\n%s"):format(row.path, row.diff) }
    end
  end
  return { name = run, rows = rows, edits = changes }
end

-- The extent of all points of a chart: {x0, x1, y0, y1}; nil when there are none. A flat line gets
-- some room.
local function extent(lists)
  local e
  for _, points in ipairs(lists) do
    for _, p in ipairs(points) do
      e = e or { x0 = p[1], x1 = p[1], y0 = p[2], y1 = p[2] }
      e.x0, e.x1 = math.min(e.x0, p[1]), math.max(e.x1, p[1])
      e.y0, e.y1 = math.min(e.y0, p[2]), math.max(e.y1, p[2])
    end
  end
  if not e then return nil end
  if e.x0 == e.x1 then e.x0, e.x1 = e.x0 - 1, e.x1 + 1 end
  if e.y0 == e.y1 then
    local room = math.max(math.abs(e.y0) / 10, 1e-12)
    e.y0, e.y1 = e.y0 - room, e.y1 + room
  end
  return e
end

-- The charts of runs, those with something in them: {title, series = {{run = number, points, dots =
-- bool, name}, ...}, extent}.
local function charts_of(runs)
  local charts = {}
  for _, chart in ipairs(CHARTS) do
    local series, lists = {}, {}
    for i, run in ipairs(runs) do
      for _, key in ipairs { "line", "dots" } do
        local points = points_of(run.rows, chart[key])
        if #points > 0 then
          series[#series + 1] = { run = i, points = M.thin(points, MOST_POINTS),
            dots = key == "dots", name = chart[key] }
          lists[#lists + 1] = points
        end
      end
    end
    if #series > 0 then
      charts[#charts + 1] = { title = chart.title, series = series, extent = extent(lists) }
    end
  end
  return charts
end

-- ---- in the terminal ---------------------------------------------------------------------------

local COLOURS = { 34, 31, 32, 35, 36, 33 } -- of the runs, as terminals number them
local BITS = { { 0x01, 0x02, 0x04, 0x40 }, { 0x08, 0x10, 0x20, 0x80 } } -- of a braille cell

-- Sets the dots of a line from one dot to another.
local function stroke(set, x0, y0, x1, y1)
  local steps = math.max(math.abs(x1 - x0), math.abs(y1 - y0), 1)
  for i = 0, steps do
    set(math.floor(x0 + (x1 - x0) * i / steps + 0.5), math.floor(y0 + (y1 - y0) * i / steps + 0.5))
  end
end

-- The rows of a chart of so many cells, each of two by four dots.
local function canvas(chart, columns, rows, colour)
  local e, cells, owner = chart.extent, {}, {}
  local wide, high = 2 * columns - 1, 4 * rows - 1
  for _, s in ipairs(chart.series) do
    local function set(x, y)
      local cell = (y // 4) * columns + x // 2
      cells[cell] = (cells[cell] or 0) | BITS[x % 2 + 1][y % 4 + 1]
      owner[cell] = s.run
    end
    local last_x, last_y
    for _, p in ipairs(M.thin(s.points, 4 * columns)) do
      local x = math.floor((p[1] - e.x0) / (e.x1 - e.x0) * wide + 0.5)
      local y = math.floor((e.y1 - p[2]) / (e.y1 - e.y0) * high + 0.5)
      stroke(set, last_x or x, last_y or y, x, y)
      last_x, last_y = x, y
    end
  end
  local lines = {}
  for row = 0, rows - 1 do
    local parts = {}
    for column = 0, columns - 1 do
      local cell = row * columns + column
      local text = utf8.char(0x2800 + (cells[cell] or 0))
      if colour and cells[cell] then
        text = ("\27[%dm%s\27[0m"):format(COLOURS[(owner[cell] - 1) % #COLOURS + 1], text)
      end
      parts[#parts + 1] = text
    end
    lines[#lines + 1] = table.concat(parts)
  end
  return lines
end

local LABEL = 10 -- columns of the numbers at the left
local HIGH = 10 -- rows of a chart

-- The charts as text, so many columns wide; colour: whether runs are told apart by it.
local function terminal(runs, charts, columns, colour)
  local out = {}
  local wide = math.max(20, columns - LABEL - 2)
  for _, chart in ipairs(charts) do
    local e = chart.extent
    out[#out + 1] = chart.title
    for i, line in ipairs(canvas(chart, wide, HIGH, colour)) do
      local label = i == 1 and ("%.4g"):format(e.y1) or i == HIGH and ("%.4g"):format(e.y0) or ""
      out[#out + 1] = ("%" .. LABEL .. "s %s"):format(label, line)
    end
    local first, last = ("%d"):format(e.x0), ("step %d"):format(e.x1)
    out[#out + 1] = (" "):rep(LABEL + 1) .. first
      .. (" "):rep(math.max(1, wide - #first - #last)) .. last
  end
  for i, run in ipairs(runs) do
    local text = run.name
    for _, chart in ipairs(charts) do
      for _, s in ipairs(chart.series) do
        if s.run == i then
          text = ("%s  %s %.5g"):format(text, s.name, s.points[#s.points][2])
        end
      end
    end
    if colour then text = ("\27[%dm%s\27[0m"):format(COLOURS[(i - 1) % #COLOURS + 1], text) end
    out[#out + 1] = text
  end
  return table.concat(out, "\n")
end

-- ---- as a page ---------------------------------------------------------------------------------

local PAGE = [[
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title>
<style>
:root { --ink: #222; --soft: #777; --grid: #ddd; --ground: #fff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --soft: #999; --grid: #333; --ground: #161616 }
}
body { font: 14px system-ui, sans-serif; margin: 2em auto; max-width: 900px; color: var(--ink);
  background: var(--ground) }
h2 { font-size: 1em; margin: 1.5em 0 0.2em }
svg { width: 100%; display: block; overflow: visible }
text { font-size: 11px; fill: var(--soft) }
.grid { stroke: var(--grid) } .edit { stroke: var(--soft); stroke-dasharray: 2 3 }
.line { fill: none; stroke-width: 1.5 } .dots { stroke-dasharray: 5 4 }
.cursor { stroke: var(--soft) } .told { min-height: 1.4em; color: var(--soft); white-space: pre }
.key { display: inline-block; width: 1em; height: 3px; margin: 0 0.4em 0.25em 1.2em }
</style></head><body>
<h1>TITLE</h1>
<p>LEGEND</p>
CHARTS
<script>
for (const chart of DATA) {
  const svg = document.getElementById(chart.id), told = svg.nextElementSibling
  const cursor = svg.querySelector('.cursor')
  svg.addEventListener('mousemove', event => {
    const box = svg.getBoundingClientRect(), e = chart.extent
    const x = (event.clientX - box.left) / box.width * WIDE
    const step = e.x0 + (x - LEFT) / (WIDE - LEFT - RIGHT) * (e.x1 - e.x0)
    const lines = chart.series.map(s => {
      let best = s.points[0]
      for (const p of s.points)
        if (Math.abs(p[0] - step) < Math.abs(best[0] - step)) best = p
      return `${s.title} ${best[1].toPrecision(5)} at step ${best[0]}`
    })
    cursor.setAttribute('x1', x)
    cursor.setAttribute('x2', x)
    cursor.setAttribute('visibility', 'visible')
    told.textContent = lines.join('   ')
  })
  svg.addEventListener('mouseleave', () => {
    cursor.setAttribute('visibility', 'hidden')
    told.textContent = ''
  })
}
</script></body></html>
]]

local WIDE, TALL, LEFT, RIGHT, TOP, BOTTOM = 900, 240, 60, 10, 8, 22
local INKS = { "#2563eb", "#dc2626", "#16a34a", "#9333ea", "#0891b2", "#ca8a04" }

local function escaped(text)
  return (text:gsub("[&<>\"]", { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;",
    ["\""] = "&quot;" }))
end

-- Round numbers between two: about `count` of them.
function M.ticks(low, high, count)
  local raw = (high - low) / count
  local power = 10.0 ^ math.floor(math.log(raw, 10))
  local step = 10 * power
  for _, factor in ipairs { 1, 2, 5 } do
    if factor * power >= raw then
      step = factor * power
      break
    end
  end
  local ticks = {}
  for i = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) do
    ticks[#ticks + 1] = i * step
  end
  return ticks
end

local function svg(chart, id, runs)
  local e, out = chart.extent, {}
  local function add(format, ...) out[#out + 1] = format:format(...) end
  local function x_of(step) return LEFT + (step - e.x0) / (e.x1 - e.x0) * (WIDE - LEFT - RIGHT) end
  local function y_of(value)
    return TOP + (e.y1 - value) / (e.y1 - e.y0) * (TALL - TOP - BOTTOM)
  end
  add('<h2>%s</h2>\n<svg id="%s" viewBox="0 0 %d %d">', chart.title, id, WIDE, TALL)
  for _, y in ipairs(M.ticks(e.y0, e.y1, 5)) do
    add('<line class="grid" x1="%d" x2="%d" y1="%.1f" y2="%.1f"/>', LEFT, WIDE - RIGHT, y_of(y),
      y_of(y))
    add('<text x="%d" y="%.1f" text-anchor="end">%.4g</text>', LEFT - 6, y_of(y) + 4, y)
  end
  for _, x in ipairs(M.ticks(e.x0, e.x1, 8)) do
    add('<text x="%.1f" y="%d" text-anchor="middle">%.6g</text>', x_of(x), TALL - 6, x)
  end
  for i, run in ipairs(runs) do
    for _, edit in ipairs(run.edits) do
      if edit[1] >= e.x0 and edit[1] <= e.x1 then
        add('<line class="edit" x1="%.1f" x2="%.1f" y1="%d" y2="%d" style="stroke:%s"><title>step '
          .. '%d of %s: %s</title></line>', x_of(edit[1]), x_of(edit[1]), TOP, TALL - BOTTOM,
          INKS[(i - 1) % #INKS + 1], edit[1], escaped(run.name), escaped(edit[2]))
      end
    end
  end
  for _, s in ipairs(chart.series) do
    local ink, parts = INKS[(s.run - 1) % #INKS + 1], {}
    for i, p in ipairs(s.points) do parts[i] = ("%.1f,%.1f"):format(x_of(p[1]), y_of(p[2])) end
    add('<polyline class="line%s" stroke="%s" points="%s"/>', s.dots and " dots" or "", ink,
      table.concat(parts, " "))
    if s.dots or #s.points == 1 then
      for _, p in ipairs(s.points) do
        add('<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>', x_of(p[1]), y_of(p[2]), ink)
      end
    end
  end
  add('<line class="cursor" y1="%d" y2="%d" visibility="hidden"/>\n</svg><div class="told"></div>',
    TOP, TALL - BOTTOM)
  return table.concat(out, "\n")
end

local function page(runs, charts)
  local names, keys, drawn, data = {}, {}, {}, {}
  for i, run in ipairs(runs) do
    names[i] = escaped(run.name)
    keys[i] = ('<span class="key" style="background:%s"></span>%s'):format(
      INKS[(i - 1) % #INKS + 1], names[i])
  end
  for i, chart in ipairs(charts) do
    local id = "chart" .. i
    drawn[i] = svg(chart, id, runs)
    local series = {}
    for j, s in ipairs(chart.series) do
      series[j] = { points = s.points, title = #runs > 1 and ("%s %s"):format(runs[s.run].name,
        s.name) or s.name }
    end
    data[i] = { id = id, extent = chart.extent, series = series }
  end
  local filled = { TITLE = table.concat(names, ", "), LEGEND = table.concat(keys),
    CHARTS = table.concat(drawn, "\n"), WIDE = tostring(WIDE), LEFT = tostring(LEFT),
    RIGHT = tostring(RIGHT), DATA = json.encode(data):gsub("</", "<\\/") }
  return (PAGE:gsub("%f[%u]%u+%f[^%u]", filled))
end

-- ---- both --------------------------------------------------------------------------------------

-- plot({run, ...}, {out, columns, colour}): the text for the terminal and the path of the page; or
-- nil, message. out: plot.html, in the folder of a single run.
function M.plot(paths, given)
  local o = options.read("plot", given, { out = options.optional, columns = 80, colour = false })
  local runs = {}
  for i, path in ipairs(paths) do
    local message
    runs[i], message = read(path)
    if not runs[i] then return nil, message end
  end
  local charts = charts_of(runs)
  if #charts == 0 then
    return nil, ("%s: neither loss nor learning rate nor gradient norm is logged"):format(paths[1])
  end
  local out = o.out or #runs == 1 and runs[1].name .. "/plot.html" or "plot.html"
  local ok, message = file.write_atomic(out, page(runs, charts))
  if not ok then return nil, tostring(message) end
  return terminal(runs, charts, o.columns, o.colour), out
end

return M
