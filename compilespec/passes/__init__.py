"""Stage "rewrite": turns captured graphs into steps, by passes that can be listed and tested alone.

    order.py      the passes in the order in which they run; `rewrite_phase` runs them
    runner.py     applies a list of passes: counts, times, checks
    context.py    what passes read and declare; one record a graph
    contracts.py  what holds after a pass and all later ones
    graph/        nodes by role, fragments, the retrace, storage, fake inputs
    splice/       passes on torch IR: tensor code written between the nodes of the target
    aten/         passes on ATen, after the retrace
    proofs/       integer ranges: every index is inside its tensor
    references/   what a step computes, in plain Python; `compilespec.verify` compares

A splicing pass takes a `Splice` (splice/builder.py) and writes over the roles of the step
(splice/roles.py).  In their order:

    check_markers           every attention layer is a marker
    absorb_latents          attention over keys of a latent becomes attention over the latent
    tap_hidden_states       names the hidden states that the drafter reads
    read_rope_offsets       rotary offsets come from the host, or a state row
    read_state              ids, positions, slots come from state rows
    read_long_rope          a state row says whose rotary table is the long one
    read_embeds             rows of a prompt may be embeddings
    add_deep_rows           layers get features of images
    add_adapters            products get what LoRA adapters change
    narrow_logits           the head of a prefill runs on last rows alone
    insert_cached_keys      masks that a model computes read what the cache holds of all tokens
    insert_paged_attention  markers become attention over the paged cache
    insert_recurrent_state  recurrences and convolutions get state rows
    process_logits          processors change the logits
    splice_acceptance       judges the drafts; gives the tokens of the step
    keep_path               goes on with a tree's accepted path, as with a chain
    output_hidden_states    the taps become an output
    output_head_input       what the head takes of a prompt becomes an output
    shift_hidden_states     pairs each hidden state with the token after it
    splice_draft_loop       makes the next drafts; the loops are in splice/draft_loops/
    trim_draft_head         cuts the drafter's head to the ids that it may propose
    narrow_rows             skips rows that nothing reads
    lower_quantized         quantized products become operators
    report_evidence         the step says how sure its drafts are
    commit_state            writes tokens, drafts and lengths to state rows
    shard_weights           leaves one rank's part of the step

Of a replay, which runs the drafter over what steps of K = 0 kept:

    read_kept               the kept inputs take the roles that a draft loop reads
    commit_drafts           writes the new drafts behind each request's last token

On ATen:

    cleanup                 dead code, no-ops, duplicates
    merge_projections       products of one activation become one
    fuse_head_argmax        an argmax over a product writes no logits
    read_long_rows          argmax and top-k of long rows by operators of ours
    prepack_linears         weights in the layout of the kernels
    bound_positions         guards every index that is not proved
    check_mutations         every buffer is written, and nothing else
"""
