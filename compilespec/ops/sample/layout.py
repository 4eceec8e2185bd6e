"""The columns of a request's sampling rows; kernel.cpp has the same numbers.

A row of zeros means greedy decoding on unprocessed logits.
"""

# sampling_RF, float32
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
NUM_FLOATS = 6

# sampling_RI, int32; the stop ids of `min_new_tokens` fill the row's end
SEED_LOW, SEED_HIGH, SAMPLE, FLAGS, TOP_K, PROMPT_LEN, MIN_NEW, LOGPROBS, NUM_STOPS = range(9)
FIRST_STOP, MAX_STOPS = 9, 55
NUM_INTS = FIRST_STOP + MAX_STOPS

# LOGPROBS: 0 is none, 1 the chosen token's, n + 1 also those of the n best
MAX_LOGPROBS = 20

# FLAGS
PENALISE = 1  # some penalty is set: the row of context_RL is kept and read
BIAS = 2  # the row of bias_RV is added
GUIDE = 4  # mask_RSW says which ids each row of the window may choose

MIN_TEMPERATURE = 1e-5  # below it the most probable token is taken

# Streams: disjoint random numbers of one (seed, sample, position, token id).
STREAM_DRAW = 0  # the target's draw, and that of a draft coupled with it
STREAM_DRAFT, STREAM_ACCEPT, STREAM_RECOVER, STREAM_BONUS = 1, 2, 3, 4  # of rules with weights
STEP = 8
"""These four also differ in every step: STEP * (position - the last emitted token's) is added, so
that unused draws of a step do not influence later ones.
"""
