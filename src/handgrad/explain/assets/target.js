// @ts-check
export const targetBar = (state, actions) => [];
