-- What the run in progress needs to know of things made outside it. Models and optimizers enter
-- themselves when they are made; the recipe's run reads them for saves, and lends optimizers its
-- divisor. Without a run nothing is entered.
return {
  run = nil, -- the run that xt.recipe made last, or nil
  -- Where steps of a run are made again (replay.lua): {options, out, save = folder or nil, run =
  -- folder whose edits.jsonl holds, last = step, chain = {}, trap, stand = function(run) or nil}.
  -- The recipe takes these options, writes nothing and enters the digest of every step in `chain`.
  -- After step `last` it calls stand(run), which may make `last` larger, and else enters `digests`
  -- of all tensors, `loss`, `norm` and `lr` and raises this table. With `trap`, steps that are not
  -- finite are looked into.
  replay = nil,
}
