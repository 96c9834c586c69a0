# Runs an example twice on one directory: the second run has to find what the first
# one stored. Variables: PROGRAM, DIR.
file(REMOVE_RECURSE ${DIR})
execute_process(COMMAND ${PROGRAM} ${DIR} OUTPUT_VARIABLE first COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${PROGRAM} ${DIR} OUTPUT_VARIABLE second COMMAND_ERROR_IS_FATAL ANY)
file(REMOVE_RECURSE ${DIR})
if(NOT first MATCHES "0 of 4 chunks were there")
  message(FATAL_ERROR "first run:\n${first}")
endif()
if(NOT second MATCHES "4 of 4 chunks were there")
  message(FATAL_ERROR "second run:\n${second}")
endif()
