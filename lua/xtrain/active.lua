-- What the run in progress needs to know of things made outside it. Models and optimizers enter
-- themselves when they are made; the recipe's run reads them for saves, and lends optimizers its
-- divisor. Without a run nothing is entered.
return {
  run = nil, -- the run that xt.recipe made last, or nil
  -- Where steps of a run are made again (replay.lua): {options, out, save = folder or nil, run =
  -- folder whose edits.jsonl holds, last = step, chain = {}}. The recipe takes these options,
  -- writes nothing, enters the digest of every step in `chain`, and after step `last` enters
  -- `digests` of all tensors and raises this table. words: overrides, as on the command line; steps
  -- = {}: gets {loss, lr, grad_norm} of each step; trap: steps that are not finite are looked into;
  -- stand(run): called after step `last`, before the end, which it may put off by a larger `last`.
  replay = nil,
  -- before_step(run, step), called when a step has begun and nothing of it is done yet; or nil.
  before_step = nil,
}
