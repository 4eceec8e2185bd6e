"""What a request's sampling rows hold, column by column; kernel.cpp has the same numbers.

A row of zeros is greedy decoding without anything that changes logits.
"""

# sampling_RF, float32
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
NUM_FLOATS = 6

# sampling_RI, int32; the stop ids of `min_new_tokens` fill the row's end
SEED_LOW, SEED_HIGH, SAMPLE, FLAGS, TOP_K, PROMPT_LEN, MIN_NEW, LOGPROBS, NUM_STOPS = range(9)
FIRST_STOP, MAX_STOPS = 9, 55
NUM_INTS = FIRST_STOP + MAX_STOPS

# LOGPROBS: 0 is none, 1 the chosen token's, n + 1 the n best ones' too
MAX_LOGPROBS = 20

# FLAGS
PENALISE = 1  # some penalty is on: the row of context_RL is kept and read
BIAS = 2  # the row of bias_RV is added
GUIDE = 4  # mask_RSW says which ids each row of the window may choose

MIN_TEMPERATURE = 1e-5  # below it the most probable token is taken

# Streams: disjoint random numbers of one (seed, sample, position, token id).
STREAM_DRAW = 0  # the target's draw, and that of a draft coupled with it
STREAM_DRAFT, STREAM_ACCEPT, STREAM_RECOVER, STREAM_BONUS = 1, 2, 3, 4  # of rules with weights
STEP = 8
"""These four differ in every step as well: STEP * (position - the last emitted token's) is added,
so that what a step drew and did not use has no part in what a later one draws."""
