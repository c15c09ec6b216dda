// Included ahead of everything in the race programs: which planted fault is on. 0: none.
#pragma once

extern int dcp_mutation;
#define DCP_MUTATION dcp_mutation
