-- Which algorithms a GPU's products take: their text, what tuning does to a table, what saves keep.
-- None of it needs a GPU.
local expect = require "expect"
local xt = require "xtrain"
local products = require "xtrain.products"
local save = require "xtrain.save"

local raises = expect.raises

-- A row of m x 16 x 24 whose algorithm is eight times `word`.
local function row(m, word)
  local words = ("0x%x, "):format(word):rep(4):sub(1, -3)
  return ('PRODUCT("A GPU", 130100, bf16, f32, %d, 16, 24, 1,\n'
    .. "        24, 16, 16, 0, 0, 0, 0, 1, 0, 1, 64, 64, 64,\n        %s,\n        %s)\n")
    :format(m, words, words)
end

local function temporary()
  local path = os.tmpname()
  finally(function() os.remove(path) end)
  return path
end

describe("a table of algorithms", function()
  it("is merged: sorted, a row a product, the new one's; its head stays", function()
    local head = "/* What this is.\n   PRODUCT( in a comment is none of its rows. */\n"
    local text, added, changed = products.merge(head .. row(30, 1) .. row(4, 1), "old",
      row(7, 2) .. row(30, 2) .. row(4, 1) .. row(7, 3))
    assert.are.equal(head .. row(4, 1) .. row(7, 3) .. row(30, 2), text)
    assert.are.same({ 1, 1 }, { added, changed })
    assert.are.equal(text, (products.merge(text, "old", "")))
    assert.are.equal(row(4, 1), (products.merge("", "old", row(4, 1))))
    assert.are.equal(head .. row(4, 1), (products.merge(head, "old", row(4, 1))))
  end)

  it("that is malformed is refused by name, line and field", function()
    local bad = row(4, 1) .. row(5, 1):gsub("64, 64, 64", "64, 65, 64")
    raises("old.def:6: b_align, 1 to 64, is wanted", products.merge, bad, "old.def", "")
    raises("tuning:6: b_align, 1 to 64, is wanted", products.merge, "", "old.def", bad)
  end)
end)

describe("a save's algorithms", function()
  it("are taken as the lines they are, and refused by line", function()
    assert.is_true(products.use(nil, "save"))
    assert.is_true(products.use({}, "save"))
    assert.is_true(products.use({ (row(1, 9):gsub("%s+", " ")), row(2, 9) }, "save"))
    assert.are.same({ nil, "save, products: is no list" }, { products.use("x", "save") })
    assert.are.same({ nil, "save, products:2: is no string" },
      { products.use({ row(1, 9), 7 }, "save") })
    local ok, message = products.use({ (row(1, 9):gsub("%s+", " ")), "PRODUCT(1)" }, "save")
    assert.is_nil(ok)
    assert.truthy(message:find("save, products:2: '\"' is wanted, not '1)'", 1, true), message)
  end)

  it("are none on a CPU, whatever was read", function()
    assert.is_true(products.use({ row(1, 9) }, "save"))
    assert.are.same({}, xt.core.products())
    assert.is_nil(products.rows())
    assert.is_nil(save.fingerprint("cpu").products)
  end)
end)

describe("tuning", function()
  it("puts what is faster into the file, and tells the times", function()
    local core, path = xt.core, temporary()
    local real = { products = core.products, tune = core.tune }
    finally(function() core.products, core.tune = real.products, real.tune end)
    local function choice(m, from, text, before_us, after_us)
      return { m = m, n = 16, k = 24, batch = 1, dtype = "bf16", out = "f32", add = true,
        from = from, row = text, measured = before_us and 9, before_us = before_us,
        after_us = after_us }
    end
    core.products = function()
      return { choice(4, "heuristic", row(4, 1), 7.0, 7.0),
        choice(5, "tuned", row(5, 2), 66.5, 57.5), choice(6, "tuned", row(6, 2), 8.0, 8.0),
        choice(7, "table", row(7, 1)) }
    end
    local on
    core.tune = function(value) on = value end
    assert(io.open(path, "wb")):write("/* Head. */\n" .. row(9, 1) .. row(6, 1)):close()
    local said = products.finish_tuning(path)
    assert.is_false(on)
    assert.are.equal("5 x 16 x 24 bf16 to f32, added: 66.5 us, now 57.5 (0.86), of 9 algorithms\n"
      .. path .. ": 3 products and 27 algorithms measured, 1 rows new, 1 changed", said)
    assert.are.equal("/* Head. */\n" .. row(5, 2) .. row(6, 2) .. row(9, 1),
      assert(io.open(path)):read("a"))
    os.remove(path)
    products.finish_tuning(path)
    local text = assert(io.open(path)):read("a")
    assert.truthy(text:find("^/%*[^\n]*%*/\nPRODUCT%("))
    assert.are.equal(row(5, 2) .. row(6, 2), text:gsub("^[^\n]*\n", ""))
    assert.are.same({ (row(4, 1):gsub("\n *", " "):gsub(" $", "")) }, { products.rows()[1] })
  end)

  it("without a GPU says so, and leaves the file alone", function()
    if pcall(xt.zeros, {}, { device = "cuda" }) then return end
    local path = temporary()
    raises("tune: there is no device cuda on this machine", products.start_tuning, path)
    raises("there is no device cuda on this machine", xt.core.product_library)
    assert.are.equal("", assert(io.open(path)):read("a"))
  end)

  it("is refused in a run, and on a CPU", function()
    local o = { name = "tuned", out = "", tune = "x.def" }
    raises("goes with device=cuda bench=1 graph=false", xt.recipe, o, {})
    raises("goes with device=cuda bench=1 graph=false", xt.recipe, o, { "device=cpu", "bench=1" })
  end)
end)
