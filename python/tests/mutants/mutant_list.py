"""The ways in which the package is broken, and the test that has to notice each."""

from __future__ import annotations

from typing import NamedTuple

ASSERTIONS = ("AssertionError", "Failed")  # the latter: pytest.raises that saw nothing


class Mutant(NamedTuple):
    name: str  # the promise that is broken
    file: str  # that is changed, below the package
    old: str  # stands there exactly once
    new: str  # takes its place
    test: str  # node id below the directory of tests
    by: tuple[str, ...] = ASSERTIONS  # exceptions that count as noticing

    @property
    def module(self) -> str:
        return "kvtier." + self.file.removesuffix(".py").replace("/", ".")

    def apply(self, source: str) -> str:
        """The changed source. Raises ValueError when the mutant does not fit."""
        if self.old == self.new:
            raise ValueError("it changes nothing")
        if (n := source.count(self.old)) != 1:
            raise ValueError(
                f"{n} places in {self.file} read\n{self.old}\nand it must be one: the code has changed, "
                "refit the mutant"
            )
        changed = source.replace(self.old, self.new)
        try:
            compile(changed, self.file, "exec")
        except SyntaxError as e:
            raise ValueError(f"changed {self.file} is not Python: {e}") from e
        return changed


#: Whose KV is found.
IDENTITY = [
    Mutant(
        "kinds of requests not looked at",
        "vllm/scheduler.py",
        old="            check_identifiable(r)\n",
        new="",
        test="vllm/test_crosshit.py::test_what_cannot_be_identified_is_not_cached_and_says_so_once",
    ),
    Mutant(
        "salt not in the root",
        "vllm/keychain.py",
        old="extras.append(keys.Extra(keys.SALT, keys.digest(request.cache_salt)))",
        new="pass",
        test="vllm/test_scheduler.py::test_salt_and_tag_separate",
    ),
    Mutant(
        "tag not in the root",
        "vllm/keychain.py",
        old="extras = list(self._tag)",
        new="extras = []",
        test="vllm/test_keychain.py::test_prefix_extras_separate",
    ),
    Mutant(
        "adapter not in the root",
        "vllm/keychain.py",
        old="extras.append(keys.Extra(keys.LORA, self._loras.get(request.lora_request, request)))",
        new="self._loras.get(request.lora_request, request)",
        test="vllm/test_keychain.py::test_lora_is_identified_by_content",
    ),
    Mutant(
        "adapter believed to be what it was",
        "vllm/content.py",
        old="if self._loaded.setdefault(slot, digest) != digest:",
        new="if not digest:",
        test="vllm/test_keychain.py::test_lora_replaced_under_the_same_path",
    ),
    Mutant(
        "some of two adapters taken for one",
        "vllm/content.py",
        old="same = _adapter(path) == signature",
        new="same = len(_adapter(path)) == len(signature)",
        test="vllm/test_keychain.py::test_lora_that_changes_while_it_is_read",
    ),
    Mutant(
        "image known by its identifier",
        "vllm/keychain.py",
        old="multimodal_digest(f.modality, content, n))",
        new="multimodal_digest(f.modality, f.identifier.encode(), n))",
        test="vllm/test_crosshit.py::test_an_id_of_the_callers_finds_only_the_same_image",
    ),
    Mutant(
        "identifier of two images believed",
        "vllm/content.py",
        old='self._contents[identifier] = b""',
        new="self._contents[identifier] = digest",
        test="vllm/test_keychain.py::test_an_identifier_of_two_contents_stands_for_none",
    ),
    Mutant(
        "image only in the chunk where it begins",
        "vllm/keychain.py",
        old="min(end, -(-(start + length) // c))",
        new="min(end, start // c + 1)",
        test="vllm/test_keychain.py::test_multimodal_items_are_in_every_chunk_they_touch",
    ),
    Mutant(
        "token after a chunk not in the key for draft layers",
        "vllm/keychain.py",
        old="        if self._ahead:\n            after =",
        new="        if self._ahead > 1:\n            after =",
        test="vllm/test_keychain.py::test_keys_that_name_the_next_token",
    ),
    Mutant(
        "rope not in the fingerprint",
        "vllm/identity.py",
        old="    use_bfloat16 initializer_range\n",
        new="    use_bfloat16 initializer_range rope_parameters rope_scaling rope_theta\n",
        test="vllm/test_description.py::test_one_field_tells_engines_apart[theta]",
    ),
    Mutant(
        "hf_overrides not in the fingerprint",
        "vllm/identity.py",
        old="config = _relevant(model.hf_config.to_dict())",
        new='config = _relevant(json.loads((_directory(model.model, None) / "config.json").read_text()))',
        test="vllm/test_description.py::test_hf_overrides_are_in_the_description",
    ),
    Mutant(
        "dtype of the cache not in the fingerprint",
        "vllm/identity.py",
        old='kv_dtype=dtype if cache_dtype == "auto" else cache_dtype',
        new="kv_dtype=dtype",
        test="vllm/test_description.py::test_one_field_tells_engines_apart[kv dtype]",
    ),
    Mutant(
        "weights that changed during the start recognised",
        "vllm/identity.py",
        old="    if changed is not None:",
        new="    if changed is None and began < 0:",
        test="vllm/test_description.py::test_weights_that_change_during_the_start_stay_in_memory[swap_file-model]",
    ),
]

#: Resets, what is stored, and what a request asks for.
STORING = [
    Mutant(
        "reset keeps the epoch",
        "vllm/scheduler.py",
        old="self._epoch = self._coordinator.reset()",
        new='self._epoch = b""',
        test="vllm/test_scheduler.py::test_reset_begins_an_epoch",
    ),
    Mutant(
        "pages from before a reset stored",
        "vllm/storing.py",
        old="or t.frozen or",
        new="or",
        test="vllm/test_scheduler.py::test_requests_with_pages_store_nothing_after_a_reset",
    ),
    Mutant(
        "chunks of a reset engine on disk",
        "vllm/storing.py",
        old="no_disk=bool(t.epoch) or t.memory_only",
        new="no_disk=t.memory_only",
        test="vllm/test_scheduler.py::test_restart_finds_what_is_on_disk",
    ),
    Mutant(
        "offers not bound by the tokens that came out",
        "vllm/storing.py",
        old="end = min(r.num_computed_tokens + scheduled, r.num_tokens - self._ahead)",
        new="end = r.num_computed_tokens + scheduled",
        test="vllm/test_features.py::test_drafts_are_never_stored",
    ),
    Mutant(
        "chunks stored before they are computed",
        "vllm/storing.py",
        old="end = min(r.num_computed_tokens + scheduled, r.num_tokens - self._ahead)",
        new="end = r.num_tokens - self._ahead",
        test="vllm/test_scheduler.py::test_a_prompt_computed_in_parts_is_stored_in_parts",
    ),
    Mutant(
        "wish not to be stored ignored",
        "vllm/tracked.py",
        old="self.may_load, self.may_store = asked.load, asked.store",
        new="self.may_load, self.may_store = asked.load, True",
        test="vllm/test_features.py::test_opting_out_for_storing_leaves_nothing_behind",
    ),
    Mutant(
        "wish not to be loaded ignored",
        "vllm/tracked.py",
        old="self.may_load, self.may_store = asked.load, asked.store",
        new="self.may_load, self.may_store = True, asked.store",
        test="vllm/test_scheduler.py::test_wishes_of_a_request",
    ),
    Mutant(
        "wish to be kept off the disk ignored",
        "vllm/storing.py",
        old="no_disk=bool(t.epoch) or t.memory_only",
        new="no_disk=bool(t.epoch)",
        test="vllm/test_features.py::test_memory_only",
    ),
    Mutant(
        "misspelt wish passed over",
        "vllm/wishes.py",
        old='            return _not_understood(f"has the unknown key',
        new='            _warn(f"has the unknown key',
        test="vllm/test_features.py::test_wishes_that_are_not_understood[mine4-has the unknown key 'stores'; the nearest one is 'store']",
    ),
    Mutant(
        "capacity without the disk",
        "vllm/announcement.py",
        old="return max(a.slots * a.chunk_tokens, tokens_on_disk(a))",
        new="return a.slots * a.chunk_tokens",
        test="vllm/test_truth.py::test_start_line",
    ),
]

#: Loads, and what holds when something fails.
LOADING = [
    Mutant(
        "chunks that failed asked for again",
        "vllm/loading.py",
        old="load.owner.limit = min(load.owner.limit, chunk)",
        new="load.owner.limit = max(load.owner.limit, chunk)",
        test="vllm/test_once.py::test_what_failed_is_not_tried_for_ever",
    ),
    Mutant(
        "load that failed as a whole tried again",
        "vllm/loading.py",
        old="load.owner.limit = min(load.owner.limit, load.first // (self._chunk or 1))",
        new="pass",
        test="vllm/test_loading.py::test_load_whose_blocks_are_not_known_fails_as_a_whole",
    ),
    Mutant(
        "completion reported twice",
        "vllm/worker.py",
        old="plan = self._running.pop(op)",
        new="plan = self._running[op]",
        test="vllm/test_once.py::test_late_and_repeated_completions_are_swallowed",
    ),
    Mutant(
        "one page more taken for good",
        "vllm/worker.py",
        old="self._invalid.update(plan.blocks[k:])",
        new="self._invalid.update(plan.blocks[k + 1 :])",
        test="vllm/test_loading.py::test_chunk_that_cannot_be_loaded[3]",
    ),
    Mutant(
        "pages of a load taken for good when nobody knows",
        "vllm/connector.py",
        old="            results.failed_recving = results.failed_recving | results.finished_recving\n",
        new="",
        test="vllm/test_shell.py::test_pages_of_a_failed_load_are_never_taken_for_good",
    ),
    Mutant(
        "load not clipped to its range",
        "vllm/worker.py",
        old="                plan.first_token,\n                plan.tokens,\n",
        new="                plan.first_token // self._chunk * self._chunk,\n                plan.tokens,\n",
        test="vllm/test_loading.py::test_load_is_clipped_to_its_range",
    ),
    Mutant(
        "hit not cut to whole blocks",
        "vllm/scheduler.py",
        old="request.num_tokens) // self._span * self._span",
        new="request.num_tokens)",
        test="vllm/test_shapes.py::test_a_hit_ends_with_a_whole_block",
    ),
    Mutant(
        "lease kept when its request is aborted",
        "vllm/scheduler.py",
        old="        if t.load is None:\n            self._end_incarnation(t)\n            return\n        self._loading.retire(t)\n",
        new="        if t.load is None:\n            return\n        self._loading.retire(t)\n",
        test="vllm/test_scheduler.py::test_abort_of_waiting_and_running_requests",
    ),
    Mutant(
        "leases not renewed",
        "vllm/leases.py",
        old="self._coordinator.renew([i.lease for i in live])",
        new="pass",
        test="vllm/test_scheduler.py::test_leases_of_waiting_requests_are_renewed",
    ),
    Mutant(
        "leases that may have ended relied on",
        "vllm/leases.py",
        old="if now - i.touched_at > self._life_s:",
        new="if now - i.touched_at < 0:",
        test="vllm/test_scheduler.py::test_leases_of_waiting_requests_are_renewed",
    ),
    Mutant(
        "every leader waited for anew",
        "vllm/tracked.py",
        old="return max(0.0, most_s - self.held_s - held)",
        new="return most_s",
        test="vllm/test_bounds.py::test_one_bound_for_all_leaders_that_come_and_go",
    ),
    Mutant(
        "waits longer than the settings say",
        "vllm/leases.py",
        old="return min(self._most_s, tokens / self._tokens_per_s)",
        new="return tokens / self._tokens_per_s",
        test="vllm/test_scheduler.py::test_nobody_waits_longer_than_computing_takes",
    ),
    Mutant(
        "exception of a hook reaches the engine",
        "vllm/connector.py",
        old="            self.failed(hook, e)\n            return default\n",
        new="            self.failed(hook, e)\n            raise\n",
        test="vllm/test_shell.py::test_half_that_raises[get_num_new_matched_tokens-once]",
        by=("RuntimeError",),
    ),
    Mutant(
        "failing cache never switched off",
        "vllm/connector.py",
        old="        if n < MAX_FAILURES:\n",
        new="        if n > 0:\n",
        test="vllm/test_shell.py::test_half_that_raises[on_new_request-always]",
    ),
    Mutant(
        "KV of earlier weights after a reset that failed",
        "vllm/connector.py",
        old='            self._half.switch_off("a reset failed, so KV of earlier weights might be found")\n',
        new="            pass\n",
        test="vllm/test_shell.py::test_half_that_raises[reset_cache-once]",
    ),
]

MUTANTS = [*IDENTITY, *STORING, *LOADING]
