import torch

from fastp3o.rollouts.cache import Cache, LayerShape, Room


def test_slots_that_stay_keep_their_keys_in_the_memory_that_there_is():
    room = Room(prompts=2, prompt_tokens=3, responses_per_prompt=2, slots=4, response_tokens=5)
    cache = Cache({0: LayerShape(2, 8, torch.float32)}, room, torch.device("cpu"))
    layer = cache.layers[0]
    layer.own_keys.copy_(torch.randn_like(layer.own_keys))
    layer.own_values.copy_(torch.randn_like(layer.own_values))
    kept = torch.tensor([1, 3])
    expected = [layer.own_keys[kept].clone(), layer.own_values[kept].clone()]
    cache.keep_slots(kept)
    for own, before in zip((layer.own_keys, layer.own_values), expected, strict=True):
        assert torch.equal(own, before)
        assert own.untyped_storage().data_ptr() == cache.memory.untyped_storage().data_ptr()
